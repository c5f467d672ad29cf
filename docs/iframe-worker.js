// A browser starts no worker from a file. If a page is opened from one, the search's worker runs in a hidden frame instead.
// The theme's own stand-in for this is fetched from the network.
class IFrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.append(this.frame);
    const inside = this.frame.contentWindow;
    addEventListener("message", event => {
      if (event.source === inside) this.dispatchEvent(new MessageEvent("message", {data: event.data}));
    });
    // What the script of a worker calls: answers go to this window, and scripts that it needs are loaded one after another.
    const calls = `
      postMessage = data => parent.postMessage(data, "*");
      importScripts = (...urls) => urls.reduce((before, src) => before.then(() => new Promise(onload => {
        document.body.append(Object.assign(document.createElement("script"), {src, onload}));
      })), Promise.resolve());`;
    inside.document.write(`<body><script>${calls}<\/script><script src="${url}"><\/script></body>`);
    inside.document.close();  // writing has removed what listened to this window before
    this.loaded = new Promise(resolve => { inside.onload = resolve; });
  }

  postMessage(data) {
    const inside = this.frame.contentWindow;
    this.loaded.then(() => inside.dispatchEvent(new MessageEvent("message", {data: structuredClone(data)})));
  }
}

if (location.protocol === "file:") window.Worker = IFrameWorker;
