"""The rules of the house that can be read off the source: who may know whom, what owners state, what nobody writes."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from setuptools import find_namespace_packages

import zero

ROOT = Path(__file__).parents[1]
SIMULATED = ROOT / "simulated"  # a distribution of its own, with one package
PACKAGES = {"accelerators": ROOT / "accelerators", "accelerators_sim": SIMULATED / "accelerators_sim", "zero": ROOT / "zero"}
# By the name that a file has where it is installed, as "accelerators_sim/group.py".
SOURCES = {f"{package}/{path.relative_to(folder).as_posix()}": path
           for package, folder in PACKAGES.items() for path in sorted(folder.rglob("*.py"))}  # fmt: skip

# Imports go down, never up, never sideways. A folder directly inside `zero` is one room, and so is a loose module there.
FLOORS = (
    {"accelerators", "errors"},
    {"config", "plan"},
    {"comm", "memory", "optim", "profiling", "accelerators_sim"},
    {"runtime", "sequence", "setup", "checkpoint"},
    {"window"},
    {"sharding", "graph"},
    {"engine"},
    {"tools", "integrations", "compat"},
    {"", "__main__"},  # the front door
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# The same inside `zero/runtime`.
RUNTIME_FLOORS = ({"kernels"}, {"params"}, {"unshard"})
RUNTIME_FLOOR_OF = {room: floor for floor, rooms in enumerate(RUNTIME_FLOORS) for room in rooms}

NAMES_SPOKEN_IN_ONE_PLACE = {
    # zero/compat/deepspeed/comm passes torch.distributed's own functions on, as deepspeed.comm does.
    "torch.distributed": r"(zero/(comm/torch_(group|world)|comm/heads|checkpoint/dcp|compat/deepspeed/comm)|"
    r"accelerators/(staged/\w+|testing)|accelerators_sim/group)\.py",
    "torch.cuda": r"accelerators/backends/cuda\.py",
}
# The modules that import the simulated device, in a function, and report that it is not installed.
NEED_SIMULATED = {"zero/tools/plan.py": "a rehearsal counts on it what a rank holds"}
NO_TORCH = r"zero/(plan|config)/.*|zero/errors\.py"
KNOWS_NO_TORCH = "accelerators.memory"  # the module below them that these may import

# A constructor that takes more, or a file that is longer, each with the reason.
MAX_PARAMETERS, MAX_LINES = 8, 900
ARGUED: dict[str, str] = {
    "zero/window/records.py::SinceSettling": "a record of what came, which is made empty: nobody passes it anything",
    "zero/compat/deepspeed/experts.py::MoE": "scripts call it as DeepSpeed has it",
}
# The files that catch an exception of any kind, each with the reason.
BROAD_EXCEPTS = {
    "accelerators/selection.py": "a plug-in is other people's code, and must break nothing else",
    "accelerators/__main__.py": "so are its methods, and the table is there to say which of them fail",
    "accelerators/testing.py": "what fails in a rank is shown by the test that waits for it",
    "accelerators/staged/pipeline.py": "what fails on a thread is raised where the collective is waited for",
    "zero/comm/one_answer.py": "whatever fails on one rank is said on all of them, which wait for it",
    "zero/comm/pulls.py": "what fails on the thread that answers ends the group",
    "zero/tools/commands.py": "a script of the user's may fail in any way, and the command says in which",
    "zero/errors.py": "bytes that anybody wrote raise whatever parsers raise, and are named by the one who reads them",
    "zero/checkpoint/writer.py": "what fails on a thread is said when somebody next asks",
}

# A class of more attributes is an owner. The first line of its docstring states what always holds of them.
MOST_WITHOUT_INVARIANT = 8

BAD_NAMES = re.compile(r"(Manager|Handler|Helper|Utils?)$|^(utils?|common|helpers?|misc)$")
VAGUE = {"told", "found", "its", "theirs", "own", "mine", "there", "here", "at"}  # for a variable or a parameter


@pytest.fixture(scope="module", autouse=True)
def nodes_for_a_while(without_collector):
    yield
    forget_sources()
    nodes_of.cache_clear()


@cache
def tree(name):
    return ast.parse(SOURCES[name].read_text(encoding="utf-8"), name)


@cache
def nodes(name):
    """All nodes of a file, found once for all rules."""
    return every_node(tree(name))


def every_node(root):
    """Yields the nodes of `ast.walk` in half the time, as rules look at a million. Contexts are left out."""
    found = [root]
    for node in found:
        for field in node._fields:
            value = getattr(node, field, None)
            if isinstance(value, list):
                found += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and field != "ctx":
                found.append(value)
    return tuple(found)


def forget_sources():
    for cached in (tree, nodes, class_named, depth):
        cached.cache_clear()


def module_name(path):
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(name):
    """Every module that a file imports, in functions and for type checking too, with its line."""
    package = module_name(name) if name.endswith("__init__.py") else module_name(name).rpartition(".")[0]
    for node in nodes(name):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join(parts[: len(parts) - node.level + 1] + ([base] if base else []))
            modules = {f"{base}.{alias.name}" for alias in node.names if is_module(f"{base}.{alias.name}")}
            if len(modules) < len(node.names):
                modules.add(base)
            yield from ((module, node.lineno) for module in sorted(modules))


def is_module(name):
    path = name.replace(".", "/")
    return f"{path}.py" in SOURCES or f"{path}/__init__.py" in SOURCES or name in ("torch.distributed", "torch.cuda")


def room_of(module):
    package, *inside = module.split(".")
    return inside[0] if package == "zero" and inside else package.removeprefix("zero")


def wrong_imports(name):
    here, room = module_name(name), room_of(module_name(name))
    if room not in FLOOR_OF:
        yield f"{name} is in the room {room}, which is on no floor: move it, or add the room to FLOORS"
        return
    for module, line in imported(name):
        if module.partition(".")[0] not in PACKAGES:
            continue
        other = room_of(module)
        if other != room and FLOOR_OF.get(other, len(FLOORS)) >= FLOOR_OF[room]:
            yield f"{name}:{line} ({room}, floor {FLOOR_OF[room]}) imports {module} ({other})"
        if other == room == "runtime" and module.count(".") > 1:
            inner, below = here.split(".")[2], module.split(".")[2]
            if inner != below and RUNTIME_FLOOR_OF[below] >= RUNTIME_FLOOR_OF[inner]:
                yield f"{name}:{line} (runtime/{inner}) imports {module} (runtime/{below})"


def test_imports_go_down_never_up_never_sideways():
    assert not [wrong for name in SOURCES for wrong in wrong_imports(name)]


def imported_in_functions(name):
    """The lines of imports that run only where a function is called."""
    for node in nodes(name):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from (inside.lineno for inside in ast.walk(node) if isinstance(inside, (ast.Import, ast.ImportFrom)))


def wrong_of_simulated(name):
    """The simulated device is on top of `accelerators` alone, and whoever installs those and `zero` need not have it."""
    is_of_it, in_functions = name.startswith("accelerators_sim/"), {*imported_in_functions(name)}
    for module, line in imported(name):
        package = module.partition(".")[0]
        if is_of_it and package == "zero":
            yield f"{name}:{line} imports {module}"
        if not is_of_it and package == "accelerators_sim" and (name not in NEED_SIMULATED or line not in in_functions):
            yield f"{name}:{line} imports {module}, which may not be installed"


def test_the_simulated_device_is_needed_in_few_places_and_only_when_they_are_used():
    assert not [wrong for name in SOURCES for wrong in wrong_of_simulated(name)]
    for name in NEED_SIMULATED:
        assert any(module.startswith("accelerators_sim") for module, _ in imported(name)), f"{name} needs it no more"


def circles(edges):
    """Sets of modules that import each other, however long the way."""
    reached = {}

    def reach(module):
        if module not in reached:
            found, waiting = set(), [module]
            while waiting:
                new = edges[waiting.pop()] - found
                found |= new
                waiting += new
            reached[module] = found
        return reached[module]

    return {frozenset(other for other in reach(module) if module in reach(other)) for module in edges} - {frozenset()}


def test_no_modules_import_each_other():
    edges = {module_name(name): set() for name in SOURCES}
    for name in SOURCES:
        edges[module_name(name)] |= {module for module, _ in imported(name) if module in edges} - {module_name(name)}
    assert not [sorted(circle) for circle in circles(edges)]


def test_a_circle_is_found():
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": set()}
    assert circles(edges) == {frozenset("abc")}


def test_the_top_level_holds_rooms_and_nothing_loose():
    loose = {path.name for path in (ROOT / "zero").iterdir() if path.is_file()}
    assert loose == {"__init__.py", "__main__.py", "errors.py", "profiling.py", "py.typed"}


def spoken(name):
    """Every dotted name under torch in a file, with its line."""
    for node in nodes(name):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if re.fullmatch(r"torch(\.\w+)+", dotted):
                yield dotted, node.lineno
    yield from ((module, line) for module, line in imported(name) if module.partition(".")[0] == "torch")


def wrong_words(name):
    forbidden = [word for word, where in NAMES_SPOKEN_IN_ONE_PLACE.items() if not re.fullmatch(where, name)]
    for dotted, line in spoken(name):
        yield from (f"{name}:{line} says {word}" for word in forbidden if f"{dotted}.".startswith(f"{word}."))


def test_process_groups_and_cuda_are_named_in_one_place():
    assert not [wrong for name in SOURCES for wrong in wrong_words(name)]


# The files that pass addresses on, or may not import the one place that looks at them, each with the reason.
HAND_ON_ADDRESSES = {
    "zero/runtime/kernels/native.py": "C++ is given them",
    "zero/memory/homes/file.py": "the system is given them, and reads and writes whole pages",
    "zero/comm/shared_memory.py": "other ranks are told where in shared memory something lies",
    "zero/comm/results.py": "a row that a sum is written over; it is on the floor of memory, and may not import it",
}


def test_addresses_of_parameters_are_looked_at_in_one_place():
    """`untyped_storage().data_ptr()` is found by its last part."""
    attributes = ("data_ptr", "_data_ptr", "_cdata")
    looks = {name for name in SOURCES if name.startswith("zero/")
             and any(isinstance(node, ast.Attribute) and node.attr in attributes for node in nodes(name))}  # fmt: skip
    assert looks == {"zero/memory/addresses.py", *HAND_ON_ADDRESSES}


# The files of the room that touch those on disks, each with the reason; see [Note: a store] in zero/checkpoint/folder.py.
TOUCH_FILES = {
    "zero/checkpoint/disk.py": "it is how",
    "zero/checkpoint/locks.py": "a lock is on a file",
    "zero/checkpoint/folder.py": "a checkpoint of ours is a folder of files to it alone",
    "zero/checkpoint/weight_files.py": "other programs wrote them, or are to read them",
    "zero/checkpoint/importers.py": "other programs wrote them",
    "zero/checkpoint/export.py": "other programs are to read them",
    "zero/checkpoint/dcp.py": "torch wrote them, and is to read them",
}


def touches_files(name):
    calls = [node.func for node in nodes(name) if isinstance(node, ast.Call)]
    opens = any(isinstance(function, ast.Name) and function.id == "open" for function in calls)
    methods = {function.attr for function in calls if isinstance(function, ast.Attribute)}
    of_paths = {"read_text", "read_bytes", "write_text", "write_bytes", "unlink", "mkdir", "iterdir", "glob", "is_dir"}
    return opens or bool(methods & of_paths) or bool({module for module, _ in imported(name)} & {"os", "shutil", "tempfile"})


def test_the_files_of_a_checkpoint_are_touched_in_one_place():
    assert {name for name in SOURCES if name.startswith("zero/checkpoint/") and touches_files(name)} == {*TOUCH_FILES}


def wrong_numbers(name):
    if re.fullmatch(NO_TORCH, name):
        modules = ((module, line) for module, line in imported(name) if module != KNOWS_NO_TORCH)
        others = ("torch", "accelerators")
        yield from (f"{name}:{line} imports {module}" for module, line in modules if module.partition(".")[0] in others)


def test_numbers_know_no_torch():
    assert not [wrong for name in SOURCES for wrong in wrong_numbers(name)]
    modules = [module_name(name) for name in SOURCES if re.fullmatch(NO_TORCH, name)]
    program = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


def front_doors():
    for name in SOURCES:
        if name.endswith("__init__.py"):
            for node in tree(name).body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                    yield name, ast.literal_eval(node.value)


@pytest.mark.parametrize(("name", "public"), list(front_doors()), ids=lambda value: value if isinstance(value, str) else "")
def test_a_front_door_is_sorted_and_no_module_beside_it_has_a_public_name(name, public):
    assert public == sorted(public)
    # A lazy front door would return the function at the first use, and the module once somebody has imported that.
    folder = SOURCES[name].parent
    modules = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    assert not modules & set(public), f"{name} has functions that are called like modules beside it"


def classes():
    for name in SOURCES:
        for node in nodes(name):
            if isinstance(node, ast.ClassDef):
                yield name, node


def targets_of(node):
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        return [node.target]
    return []


def is_record(node):
    """Returns whether this is data without duties: a dataclass, a named tuple, an enum or a protocol."""
    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    is_dataclass = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    return is_dataclass or bool(bases & {"NamedTuple", "Protocol", "Enum", "ConfigModel"})


def is_frozen(node):
    """Whether this is a record that nobody changes."""
    decorators = map(ast.unparse, node.decorator_list)
    return is_record(node) and all("frozen=True" in each for each in decorators if "dataclass" in each)


def own_attributes(node):
    """What an object of this class keeps: what its methods assign, and the fields of a dataclass."""
    assigned = (target for statement in ast.walk(node) for target in targets_of(statement))
    flat = (item for target in assigned for item in (target.elts if isinstance(target, ast.Tuple) else [target]))
    found = {item.attr for item in flat if isinstance(item, ast.Attribute) and ast.unparse(item.value) == "self"}
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)]
    return found | {item.target.id for item in fields if "ClassVar" not in ast.unparse(item.annotation)}


def classes_seen_in(name):
    """The classes that a file defines or imports, by their name in it, each with its own file."""
    seen = {}
    for node in nodes(name):
        if isinstance(node, ast.ImportFrom) and node.module in FILE_OF:
            seen |= {alias.asname or alias.name: (FILE_OF[node.module], alias.name) for alias in node.names}
    return seen | {node.name: (name, node.name) for node in nodes(name) if isinstance(node, ast.ClassDef)}


FILE_OF = {module_name(name): name for name in SOURCES}


@cache
def class_named(name, class_name):
    return next((node for node in nodes(name) if isinstance(node, ast.ClassDef) and node.name == class_name), None)


def attributes(name, node):
    """Returns the attributes of objects of this class, those of its bases too."""
    seen, kept = classes_seen_in(name), own_attributes(node)
    for base in (seen.get(ast.unparse(base)) for base in node.bases):
        if base is not None and class_named(*base) is not None:
            kept |= attributes(base[0], class_named(*base))
    return kept


def is_kept(node):
    """Returns whether this is a dataclass with an identity: its fields change, or it is compared as the object that it is."""
    decorators = [text for text in map(ast.unparse, node.decorator_list) if "dataclass" in text]
    return any("frozen=True" not in text or "eq=False" in text for text in decorators)


def is_owner(name, node):
    """Returns whether a class keeps so much, some of it its own, that a reader needs to know what always holds of it. A record
    is none if it is a value, which nobody changes."""
    keeps = not is_record(node) or is_kept(node)
    return keeps and own_attributes(node) and len(attributes(name, node)) > MOST_WITHOUT_INVARIANT


# A sentence about things, and not about what the class does: a verb says how they are, and another word says how far that
# holds. The class's tests prove it.
_SUBJECT = r"(A|An|The|This|All|Any|At|Between|Each|Every|In|No|Nobody|Nothing|Once|Only|Outside|Until|Whatever|While|Whoever)"
_VERB = r"(is|are|was|has|have|can|cannot|may|takes?|comes?|counts?|lies|issues?|raises?|belongs?|holds?|changes?|stays?)"
_EXTENT = (
    r"(all|always|any|at (most|least)|both|each|every|exactly|except|never|no|nobody|none|nothing|once|only|unless|until|"
    r"whatever|while|whoever)"
)


def states_an_invariant(docstring):
    first = (docstring or "").partition("\n")[0]
    words = re.search(rf"\b{_VERB}\b", first) and re.search(rf"\b{_EXTENT}\b", first, re.IGNORECASE)
    return bool(words) and re.match(rf"{_SUBJECT}\b", first) is not None and first.endswith(".")


def test_an_owner_states_its_invariant_in_its_first_line():
    for name, node in classes():
        if is_owner(name, node):
            hint = "say in the docstring's first line, in one sentence, what always holds of what it keeps"
            keeps = sorted(attributes(name, node))
            assert states_an_invariant(ast.get_docstring(node)), f"{name}::{node.name} keeps {keeps}: {hint}"


@pytest.mark.parametrize("text", [
    "Memory is lent again.", "The gathers of one window, in order.", "Keeps all chunks that are there.",
    "The chunks are cached.", "A cache of all chunks.", "Every chunk is whole while", "", None,
])  # fmt: skip
def test_what_is_no_invariant_is_told(text):
    assert not states_an_invariant(text)


@pytest.mark.parametrize("text", [
    "A bucket is lent again only when no stream reads it.", "Every element has at most one place, and a layout never changes.",
    "Whatever fails, every rank has sent every bucket.\n\nMore.",
])  # fmt: skip
def test_an_invariant_is_known(text):
    assert states_an_invariant(text)


@pytest.fixture
def source_of(monkeypatch, tmp_path):
    """Puts a file of this text among the sources."""

    def put(name, text):
        (tmp_path / Path(name).name).write_text(text)
        monkeypatch.setitem(SOURCES, name, tmp_path / Path(name).name)
        monkeypatch.setitem(FILE_OF, module_name(name), name)

    yield put
    forget_sources()


def test_what_bases_keep_is_counted_and_values_are_not_owners(source_of):
    letters = "abcdefgh"
    assigned = " = ".join(f"self.{letter}" for letter in letters)
    source_of("zero/bases.py", f"class Base:\n    def __init__(self):\n        {assigned} = 0")
    source_of(
        "zero/owner.py",
        """
from zero.bases import Base

class Adds(Base):
    def __init__(self): self.more = 0

class Renames(Base):
    def other(self): return self.a

@dataclass
class Notes(Base):
    more: int

@dataclass(frozen=True)
class Value(Base):
    more: int

@dataclass(frozen=True, eq=False)
class Parts(Base):
    more: int

class Row(NamedTuple, Base):
    more: int
""",
    )
    kinds = {each: class_named("zero/owner.py", each) for each in ("Adds", "Renames", "Notes", "Value", "Parts", "Row")}
    assert attributes("zero/owner.py", kinds["Adds"]) == {*letters, "more"}
    assert [each for each, node in kinds.items() if is_owner("zero/owner.py", node)] == ["Adds", "Notes", "Parts"]
    assert not is_owner("zero/bases.py", class_named("zero/bases.py", "Base"))


def constructor_parameters(node):
    """The names that a constructor takes: of its `__init__`, or the fields of a dataclass."""
    written = [method for method in node.body if isinstance(method, ast.FunctionDef) and method.name == "__init__"]
    if written:
        given = written[0].args
        return [argument.arg for argument in [*given.posonlyargs, *given.args, *given.kwonlyargs][1:]]
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation)]
    return [ast.unparse(item.target) for item in fields if item.value is None or "init=False" not in ast.unparse(item.value)]


def test_a_constructor_takes_few_parameters():
    for name, node in classes():
        if not is_frozen(node) and f"{name}::{node.name}" not in ARGUED:
            taken = constructor_parameters(node)
            assert len(taken) <= MAX_PARAMETERS, f"{name}::{node.name} takes {taken}"


def test_fields_of_a_record_that_changes_are_counted_as_parameters():
    node = ast.parse("@dataclass\nclass Notes:\n    a: int\n    b: int = 0\n    c: int = field(init=False)").body[0]
    assert constructor_parameters(node) == ["a", "b"]


def test_a_note_of_another_file_is_cited_with_it():
    for name, path in SOURCES.items():
        text = " ".join(path.read_text().replace("#", " ").split())
        told = set(re.findall(r"(?<![Ss]ee )\[Note: ([^\]]+)\]", text))
        for note, file in re.findall(r"[Ss]ee \[Note: ([^\]]+)\](?: in ([\w/]+\.py))?", text):
            assert note in told or file, f"{name} cites [Note: {note}] without the file that has it"
            assert not file or f"[Note: {note}]" in (ROOT / file).read_text(), f"{file} has no [Note: {note}]"


def test_a_test_that_the_source_names_exists():
    """A comment may name the test that fails without a wait."""
    defined = {name for path in TESTS.values() for name in re.findall(r"^def (test_\w+)", text_of(path), re.MULTILINE)}
    for name, path in SOURCES.items():
        if name.startswith("zero/"):
            named = set(re.findall(r"\btest_\w+\b(?!\.py)", text_of(path)))
            assert named <= defined, f"{name} names {sorted(named - defined)}"


def test_a_file_holds_one_idea():
    for name, path in SOURCES.items():
        if name not in ARGUED:
            assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES, name


def is_declared(node):
    """Returns whether a function does nothing itself: it says what others do."""
    run = [each for each in node.body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))]
    return all(isinstance(each, ast.Raise) and "NotImplementedError" in ast.unparse(each) for each in run)


def names_given(node):
    """The names that a statement gives its module, or its class."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    return {target.id for target in targets_of(node) if isinstance(target, ast.Name)}


def names_of_bases(name, node):
    """The names that bases of ours give a class."""
    seen, given = classes_seen_in(name), set()
    for base in (seen.get(ast.unparse(base).partition("[")[0]) for base in node.bases):
        if base is not None and class_named(*base) is not None:
            found_in = class_named(*base)
            given |= names_of_bases(base[0], found_in).union(*map(names_given, found_in.body))
    return given


def lines_of(node):
    return set(range(min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))]), node.end_lineno + 1))


def head_of(node):
    """The lines of a definition before its body."""
    return {line for line in lines_of(node) if line < node.body[0].lineno} or {node.lineno}


@cache
def depth(name):
    """Returns the lines that a module shows and those that it hides.

    It shows what others may write: names and parameters of what is public, and fields of records. It hides everything else that
    runs. Neither counts what says nothing new, as imports, protocols and the heads of methods that a base of ours has, too; nor
    docstrings and comments, as it would be easier to keep this rule without them.
    """
    shown, neither = set(), set()

    def look(body, of_bases):
        for node in body:
            is_function, is_class = isinstance(node, ast.FunctionDef), isinstance(node, ast.ClassDef)
            is_private = all(given.startswith("_") and given != "__init__" for given in names_given(node))
            is_protocol = is_class and any("Protocol" in ast.unparse(base) for base in node.bases)
            if is_protocol or (is_function and is_declared(node)):
                neither.update(lines_of(node))
                continue
            (neither if names_given(node) <= of_bases else set() if is_private else shown).update(
                head_of(node) if is_function or is_class else {node.lineno}
            )
            if is_class and not is_private:
                look(node.body, names_of_bases(name, node))

    look(tree(name).body, set())
    for node in nodes(name):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        neither |= lines_of(node) if is_text or isinstance(node, (ast.Import, ast.ImportFrom)) else set()
    lines = enumerate(SOURCES[name].read_text(encoding="utf-8").splitlines(), 1)
    written = {number for number, line in lines if line.strip() and not line.strip().startswith("#")} - neither
    return written & shown, written - shown


# Modules whose names somebody else has chosen.
FACES = {"zero/compat/deepspeed/zero.py": "users of DeepSpeed write these, and most of them do nothing here"}
FEWEST_LINES = 60


def is_face(name):
    """Returns whether a module is there for its names alone."""
    return name.endswith(("__init__.py", "__main__.py")) or name in FACES


def is_table(name):
    """Returns whether most lines of a module are data: constants, and the fields of records, whose methods are code."""
    records = [node for node in tree(name).body if isinstance(node, ast.ClassDef) and is_record(node)]
    data = [node for body in (tree(name).body, *(record.body for record in records)) for node in body if targets_of(node)]
    written = set().union(*depth(name))
    return len(written & set().union(*map(head_of, records), *map(lines_of, data))) > len(written) / 2


def answers_a_protocol(name):
    """Returns whether a module adds no name to those that a protocol has, but for the classes that fill it in."""
    names = {node.lineno for node in tree(name).body if isinstance(node, ast.ClassDef)}
    return depth(name)[0] <= names


def test_a_module_hides_more_than_it_shows():
    for name in SOURCES:
        shown, hidden = depth(name)
        if not (is_face(name) or is_table(name) or answers_a_protocol(name)):
            assert len(hidden) > len(shown), f"{name} shows {len(shown)} lines and hides {len(hidden)}"


def test_a_short_module_is_a_face_a_table_or_answers_a_protocol():
    for name, path in SOURCES.items():
        if len(path.read_text(encoding="utf-8").splitlines()) < FEWEST_LINES:
            assert is_face(name) or is_table(name) or answers_a_protocol(name), f"merge {name} into the module that calls it"


@pytest.mark.parametrize(("text", "expected"), [
    ("def f(\n    a,\n    b,\n):\n    pass", (4, 1)),
    ('def f():\n    """Says much.\n\n    In three lines."""\n    # and here\n    return 1', (1, 1)),
    ("import re\n\nA = [\n    1,\n]\n_B = 2", (1, 3)),
    ("class P(Protocol):\n    def f(self): ...\n    def g(self): ...", (0, 0)),
    ("class C:\n    a: int\n    def _f(self): return 1\n    def g(self): raise NotImplementedError", (2, 1)),
])  # fmt: skip
def test_what_a_module_shows_is_counted_without_its_text(source_of, text, expected):
    source_of("zero/memory/counted.py", text)
    assert tuple(map(len, depth("zero/memory/counted.py"))) == expected


def test_a_method_that_a_base_has_too_shows_nothing_new(source_of):
    source_of("zero/memory/base.py", "class Base:\n    def f(self): return 1")
    source_of("zero/memory/over.py", "from zero.memory.base import Base\nclass Over(Base):\n    def f(self):\n        return 2")
    source_of("zero/memory/more.py", "from zero.memory.base import Base\nclass More(Base):\n    def g(self):\n        return 2")
    assert tuple(map(len, depth("zero/memory/over.py"))) == (1, 1)
    assert answers_a_protocol("zero/memory/over.py")
    assert not answers_a_protocol("zero/memory/more.py")


def test_a_module_of_constants_and_records_is_a_table(source_of):
    source_of("zero/memory/rows.py", "ROWS = {\n    1: 2,\n    3: 4,\n}\ndef row(n):\n    return ROWS[n]")
    source_of("zero/memory/code.py", "ROWS = {1: 2}\ndef row(n):\n    n += 1\n    return ROWS[n]")
    method = "    def f(self):\n        b = self.a\n        return b"
    source_of("zero/memory/acts.py", f"@dataclass\nclass Row:\n    a: int\n{method}")
    assert is_table("zero/memory/rows.py")
    assert not is_table("zero/memory/acts.py")
    assert not is_table("zero/memory/code.py")


def test_nothing_is_called_manager_or_utils():
    for name, path in SOURCES.items():
        assert not BAD_NAMES.search(path.stem), name
    for name, node in classes():
        assert not BAD_NAMES.search(node.name), f"{name}::{node.name}"


def vague_names(name):
    """But for fields of records, which may be what users read."""
    kinds = [node for node in nodes(name) if isinstance(node, ast.ClassDef)]
    for node in {*nodes(name)} - {item.target for kind in kinds for item in kind.body if isinstance(item, ast.AnnAssign)}:
        given = node.arg if isinstance(node, ast.arg) else node.id if isinstance(node, ast.Name) else ""
        if given in VAGUE and not isinstance(getattr(node, "ctx", None), ast.Load):
            yield f"{name}:{node.lineno} {given}"


def test_variables_say_what_they_hold():
    assert not [vague for name in SOURCES for vague in vague_names(name)]


def test_every_argued_exception_is_still_there():
    assert {*FACES} <= {*SOURCES}
    for key in ARGUED:
        name, _, class_name = key.partition("::")
        assert name in SOURCES, key
        assert not class_name or class_name in {node.name for where, node in classes() if where == name}, key


def is_broad(kind):
    return kind is None or any(word in ast.unparse(kind).replace(",", " ").split() for word in ("Exception", "BaseException"))


def broad_excepts(name):
    for node in nodes(name):
        if isinstance(node, ast.ExceptHandler):
            kind = node.type
            listed = kind.elts if isinstance(kind, ast.Tuple) else [kind]
            passes_on = any(isinstance(statement, ast.Raise) and statement.exc is None for statement in node.body)
            if any(map(is_broad, listed)) and not passes_on:
                yield node.lineno
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress") and any(map(is_broad, node.args)):
            yield node.lineno


def swallowing(name):
    """Handlers of everything, unless one before them lets Ctrl-C through, or they let everything through."""
    for node in nodes(name):
        goes_through = False
        for handler in node.handlers if isinstance(node, ast.Try) else ():
            passes_on = any(isinstance(statement, ast.Raise) and statement.exc is None for statement in handler.body)
            kind = ast.unparse(handler.type) if handler.type is not None else "BaseException"
            goes_through |= passes_on and kind == "KeyboardInterrupt"
            if "BaseException" in kind and not passes_on and not goes_through:
                yield handler.lineno


@pytest.mark.promise("X15")
def test_no_except_is_so_broad_that_it_could_swallow_ctrl_c():
    for name in SOURCES:
        lines = list(broad_excepts(name))
        assert len(lines) <= (name in BROAD_EXCEPTS), f"{name} catches everything in lines {lines}"
    for name in BROAD_EXCEPTS:
        assert list(broad_excepts(name)), f"{name} catches nothing broad any more"
        assert not list(swallowing(name)), f"{name} catches Ctrl-C too"


def is_int(node):
    return isinstance(node, ast.Constant) and type(node.value) is int


@pytest.mark.promise("X06")
def test_no_device_is_named_by_a_bare_number():
    for name in SOURCES:
        for node in nodes(name):
            if isinstance(node, ast.Call):
                function = ast.unparse(node.func)
                named = [keyword.value for keyword in node.keywords if keyword.arg == "device"]
                if function == "torch.device" or function.endswith((".to", ".cuda")):
                    named += node.args[:1]
                assert not any(map(is_int, named)), f"{name}:{node.lineno} names a device by a number, which means cuda"
                assert not function.endswith(".cuda"), f"{name}:{node.lineno} moves something to cuda whatever the device is"


ILLEGAL = {
    "zero/plan/bad.py": "import torch",
    "zero/memory/bad.py": "from zero.comm import group",
    "zero/comm/bad.py": "def f():\n    import zero.window.hooks",
    "accelerators/bad.py": "from zero import errors",
    "accelerators/choosing.py": "def f():\n    import accelerators_sim",
    "accelerators_sim/bad.py": "from zero import errors",
    "zero/engine/bad.py": "def f():\n    from accelerators_sim import pinned",
    "zero/window/bad.py": "import torch.distributed as dist",
    "zero/tools/bad.py": "import torch\ntorch.cuda.synchronize()",
    "zero/sharding/bad.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from zero.engine.engine import Engine",
    "zero/runtime/params/bad.py": "from zero.runtime.unshard import gathers",
    "zero/optim/bad.py": "found = 1",
    "zero/graph/bad.py": "def f(own): return [at for at in own]",
    "zero/nowhere.py": "",
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_these_rules_find_what_they_are_there_for(name, source_of):
    source_of(name, ILLEGAL[name])
    forget_sources()
    assert [*wrong_imports(name), *wrong_of_simulated(name), *wrong_words(name), *wrong_numbers(name), *vague_names(name)]


# What tests know of the inside of `zero` --------------------------------------------------------------------------------

TESTS = {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "tests").rglob("*.py"))}
# The modules that users import: documentation names them, with what is in them.
PUBLIC = re.compile(
    r"zero(\.(__main__|errors|config\.schema|plan\.layout|optim\.(muon|several)|integrations\..+|compat\.deepspeed(\..+)?))?"
)
OFF_THE_INSIDE = r"tests/((promises|zoo)/.*|(test_)?parity\w*\.py)"
# The files that know it still. None is added: tests/inside.py reads for all others, and tests/faults.py breaks.
KNOW_THE_INSIDE = {
    "tests/promises/test_add_param_group.py": "it compares all objects of the library, and fails at each line of two functions",
    "tests/promises/test_offload_waits.py": "it takes each wait out of the source of some classes",
}
MOST_TESTS_INSIDE = 76  # tests/inside.py, tests/faults.py and the unit tests of rooms among them


def is_public(module):
    return PUBLIC.fullmatch(module) or module in {f"zero.{name}" for name in zero.__all__}


@cache
def nodes_of(text):
    return every_node(ast.parse(text))


def inside_in(text):
    """Returns what a test imports or reads of the inside of `zero`."""
    for node in nodes_of(text):
        if isinstance(node, ast.Import):
            modules = [(alias.name, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [(node.module, f"{node.module}.{alias.name}") for alias in node.names]
        else:
            modules = []
        for module, name in modules:
            is_ours = module is not None and module.partition(".")[0] == "zero"
            if is_ours and not is_public(name) and (module == "zero" or not is_public(module)):
                yield name


def reads_parts(text):
    """The lines in which a test reads the parts of a sharded optimizer."""
    read = (node for node in nodes_of(text) if isinstance(node, ast.Attribute))
    return [node.lineno for node in read if node.attr in ("sharding", "_sharding")]


# The modules of torch and of Python, whose private names are theirs, and the private names that objects of torch have.
NOT_OURS = {"torch", "dist", "os", "atexit"}
NAMES_OF_TORCH = {
    "_backward_hooks", "_post_accumulate_grad_hooks", "_forward_pre_hooks", "_load_state_dict_post_hooks", "_parameters",
    "_local_tensor", "_version", "_zero3_consolidated_16bit_state_dict",
}  # fmt: skip


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def private_names_read(text):
    """The private names of objects that a test reads or replaces and has not given them itself, each with its line."""
    every = nodes_of(text)
    given = {name for node in every if isinstance(node, ast.ClassDef) for item in node.body for name in names_given(item)}
    given |= {target.attr for node in every for target in targets_of(node) for target in ast.walk(target)
              if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"}  # fmt: skip
    for node in every:
        if isinstance(node, ast.Attribute) and ast.unparse(node).partition(".")[0] not in NOT_OURS:
            names = [node.attr]
        elif isinstance(node, ast.Call) and re.search(r"(getattr|setattr|delattr|object|patch|Part)$", ast.unparse(node.func)):
            texts = (each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str))
            names = [text.rpartition(".")[2] for text in texts]
        else:
            names = []
        yield from ((name, node.lineno) for name in names if is_private(name) and name not in given | NAMES_OF_TORCH)


INSIDE = "tests/inside.py"
# Classes of the inside that a promise may be given all the same.
PROMISES_KNOW = {
    "Group": "a training may be given one of a test's own, to be asked by ranks that are threads",
    "Pending": "such a group returns it",
    "narrow.Code": "a test has one of its own, which is to keep the same promises",
    "Budget": "numbers of bytes, as documentation has them",
    "Traffic": "the same of what is sent",
}


def names_inside(text):
    """The names that a file has imported from inside `zero`, each with the one that it has there."""
    for node in nodes_of(text):
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "zero" and not is_public(node.module):
            yield from ((alias.asname or alias.name, alias.name) for alias in node.names)


def is_class_name(name):
    return re.match("[A-Z]+[a-z]", name.rpartition(".")[2]) is not None


def hands_out_parts(text):
    """The functions of tests/inside.py whose return annotation names a class of the inside, or nothing that tells.

    Also the names by which others may write such a class, as it assigns them, or imports them for others.
    """
    inside = {name for name, _ in names_inside(text)}
    for node in nodes_of(text):
        if isinstance(node, ast.FunctionDef) and not is_private(node.name):
            returned = ast.unparse(node.returns) if node.returns else "Any"
            for known in PROMISES_KNOW:
                returned = re.sub(rf"(?<![\w.]){re.escape(known)}\b", "", returned)
            says_nothing = re.search(r"\b(Any|object)\b", returned.replace("dict[str, Any]", ""))
            if says_nothing or inside & set(re.findall(r"\w+", returned)):
                yield node.name
        elif isinstance(node, ast.Assign) and node.col_offset == 0:
            written = ast.unparse(node.value)
            if written.partition(".")[0] in inside and is_class_name(written) and written not in PROMISES_KNOW:
                yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ImportFrom):
            again = [alias.name for alias in node.names if alias.asname == alias.name and alias.name in inside]
            yield from (name for name in again if is_class_name(name) and name not in PROMISES_KNOW)


PATCHES = re.compile(r"(setattr|delattr|setitem|delitem|patch(\.\w+)?)$")


def patches_inside(text):
    """The lines in which a test changes something inside `zero` that it has imported, named, or got of tests/inside.py."""
    inside = {name for name, _ in names_inside(text)} | {"inside"}
    for node in nodes_of(text):
        changed = [target.value for target in targets_of(node) if isinstance(target, (ast.Attribute, ast.Subscript))]
        if isinstance(node, ast.Call) and PATCHES.search(ast.unparse(node.func)):
            changed += node.args[:1]
        for each in changed:
            is_named = isinstance(each, ast.Constant) and str(each.value).startswith("zero.")
            if is_named or re.split(r"\W", ast.unparse(each))[0] in inside:
                yield node.lineno


GIVEN_TO_REPLACEMENTS = {"group": "a Group, as a test may have one of its own", "path": "a Path"}


def replacements(text):
    """The functions that a test has put in place of something inside: functions, lambdas, and those that a function makes."""
    defined = {}
    for node in nodes_of(text):
        if isinstance(node, ast.FunctionDef):
            defined.setdefault(node.name, []).append(node)
    for call in (node for node in nodes_of(text) if isinstance(node, ast.Call)):
        is_starred = bool(call.args) and isinstance(call.args[0], ast.Starred)  # setattr(*faults.STEP, ...)
        if re.search(r"\.(replaced|put)$", ast.unparse(call.func)) or (is_starred and "faults" in ast.unparse(call.args[0])):
            for given in call.args:
                if isinstance(given, ast.Lambda):
                    yield given
                elif isinstance(given, ast.Name):
                    yield from defined.get(given.id, ())
                elif isinstance(given, ast.Call):
                    made = (node for maker in defined.get(ast.unparse(given.func), ()) for node in ast.walk(maker))
                    yield from (node for node in made if isinstance(node, (ast.FunctionDef, ast.Lambda)))


def reads_what_faults_hand_over(text):
    """The lines in which a test reads an attribute of what a replaced method was given, or of whose part it is."""
    for function in replacements(text):
        given = {each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in given - set(GIVEN_TO_REPLACEMENTS):
                yield node.lineno
    parts = {ast.unparse(target) for node in nodes_of(text) for target in targets_of(node)
             if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("faults.")}  # fmt: skip
    for node in nodes_of(text):
        if isinstance(node, ast.Attribute) and node.attr == "owner":
            whose = ast.unparse(node.value)
            if whose in parts or whose.startswith("faults."):
                yield node.lineno


IMPORTS = (ast.Import, ast.ImportFrom)


def helpers_of_promises():
    """The files that promises, the zoo and parity import, over any number of others, and that are none of them."""
    reached, waiting = set(), [name for name in TESTS if re.fullmatch(OFF_THE_INSIDE, name)]
    while waiting:
        imports = {node for node in nodes_of(TESTS[waiting.pop()].read_text(encoding="utf-8")) if isinstance(node, IMPORTS)}
        modules = {f"{node.module}" for node in imports if isinstance(node, ast.ImportFrom)}
        modules |= {f"{getattr(node, 'module', '')}.{alias.name}".lstrip(".") for node in imports for alias in node.names}
        new = {f"{module.replace('.', '/')}.py" for module in modules} & TESTS.keys() - reached
        reached |= new
        waiting += new
    return sorted(name for name in reached if not re.fullmatch(OFF_THE_INSIDE, name))


# The helpers of promises that know of the inside what is said here.
HELPERS_KNOW = {
    "tests/instruments.py": "the protocol of a Group, which its Ledger is",
    "tests/loopback.py": "the same, and what adds up, as its ranks are threads",
    "tests/grid.py": "which optimizers have faster steps, to choose points",
}
BREAKS = "tests/faults.py"


def asked_of_inside(text):
    """The names that a text reads of tests/inside.py."""
    read = [node for node in nodes_of(text) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    return {node.attr for node in read if node.value.id == "inside"}


def test_helpers_of_promises_know_no_more_than_promises():
    """Promises learn nothing of the inside by way of another file, be that a helper or the unit test of a room."""
    parts = set(hands_out_parts(TESTS[INSIDE].read_text(encoding="utf-8")))
    for name in helpers_of_promises():
        text = TESTS[name].read_text(encoding="utf-8")
        assert not name.startswith(("tests/zero/", "tests/accelerators/")), f"{name} is a unit test: move what others use"
        if name != BREAKS:
            assert not list(patches_inside(text)), f"{name} changes the inside in lines {[*patches_inside(text)]}: name a fault"
        if name not in (BREAKS, INSIDE):
            asked = asked_of_inside(text)
            assert not asked & parts, f"{name} asks for {asked & parts}"
            assert not list(inside_in(text)) or name in HELPERS_KNOW, f"{name} knows {list(inside_in(text))}"
            assert not reads_parts(text), f"{name} reads the parts of an optimizer"
    for name in HELPERS_KNOW:
        assert list(inside_in(TESTS[name].read_text(encoding="utf-8"))), f"{name} knows nothing of the inside any more"


def test_promises_the_zoo_and_parity_are_given_answers_and_no_parts():
    """Promises read no private name, and call no function that returns an object of the inside."""
    parts = set(hands_out_parts(TESTS[INSIDE].read_text(encoding="utf-8")))
    for name, path in TESTS.items():
        if re.fullmatch(OFF_THE_INSIDE, name) and name not in KNOW_THE_INSIDE:
            text = path.read_text(encoding="utf-8")
            assert not list(private_names_read(text)), f"{name} reads {list(private_names_read(text))}: ask tests/inside.py"
            asked = asked_of_inside(text)
            assert not asked & parts, f"{name} asks for {asked & parts}: have tests/inside.py answer what it wants to know"
            lines = [*patches_inside(text), *reads_what_faults_hand_over(text)]
            assert not lines, f"{name} changes or reads the inside in lines {lines}: have tests/faults.py name the fault"


@pytest.mark.parametrize("text", [
    "f(optimizer)._arena", "x = inside.group(o)\nx.inner._arena.size", "def f(self): return self._group.rank",
    "monkeypatch.setattr(x, '_start', 1)", "mock.patch.object(A, '_take', f)", "getattr(x, '_y')", "mock.patch('zero.comm._f')",
])  # fmt: skip
def test_a_private_name_that_is_read_is_found(text):
    assert list(private_names_read(text))


@pytest.mark.parametrize("text", [
    "class A:\n    def __init__(self): self._x = 1\ndef f(a): return a._x", "torch._foreach_add_(x, 1)", "param._version",
    "class A:\n    def _f(self): return self._f()", "os._exit(1)", "x.__dict__", "setattr(x, 'y', 1)",
])  # fmt: skip
def test_private_names_of_a_test_of_torch_and_of_python_are_its_own(text):
    assert not list(private_names_read(text))


@pytest.mark.parametrize("returned", ["Window", "list[Window]", "Callable[[], Window]", "Any", "object", "list[object]"])
def test_a_function_that_hands_out_parts_is_found(returned):
    assert list(hands_out_parts(f"from zero.window.window import Window\ndef f(optimizer) -> {returned}: ..."))


@pytest.mark.parametrize("text", [
    "from zero.comm.results import UnreducedResult\nUnreduced = UnreducedResult",
    "from zero.window import window\nKind = window.Window", "from zero.window.window import Window as Window",
])  # fmt: skip
def test_a_class_that_is_handed_out_under_another_name_is_found(text):
    assert list(hands_out_parts(text))


@pytest.mark.parametrize("text", [
    "from zero.window import narrowing as narrow\nBLOCK = narrow.BLOCK", "from zero.comm.group import Group as Group",
    "from zero.sharding.whole_values import set_state as set_state",
])  # fmt: skip
def test_a_constant_a_function_and_what_promises_know_are_not(text):
    assert not list(hands_out_parts(text))


@pytest.mark.parametrize("text", [
    'monkeypatch.setitem(inside.codes(), "int8", code)', "inside.gathered_weights(optimizer).poison = True",
    "from zero.memory.staging import Staging\nmock.patch.object(Staging, 'borrow', f)", "mock.patch('zero.comm.pipes.take', f)",
])  # fmt: skip
def test_a_change_of_the_inside_is_found(text):
    assert list(patches_inside(text))


def test_a_change_of_what_users_have_is_none_of_the_inside():
    assert not list(patches_inside("mock.patch.object(torch, 'empty', f)\nx.grad = None\nparams[0] = inside.number_of(o, p)"))


@pytest.mark.parametrize("text", [
    "def f(masters): return masters.rank\nmonkeypatch.setattr(*faults.GIVING_PIECES, f)",
    "def slow(f):\n    def g(self): return self.ranks\n    return g\nfaults.DIAGNOSIS.put(slow(plain))",
    "faults.STEP.replaced(lambda updater: updater.inner)", "wait = faults.waiting_for_weights(o)\nf(wait.owner)",
])  # fmt: skip
def test_an_attribute_of_what_a_fault_hands_over_is_found(text):
    assert list(reads_what_faults_hand_over(text))


def test_what_a_replacement_hands_on_it_does_not_read():
    text = "def f(self, group): return group.rank, real(self, group)\nwith faults.STEP.replaced(f): layout.owner"
    assert not list(reads_what_faults_hand_over(text))


@pytest.mark.parametrize("returned", ["int", "dict[str, Any]", "Group", "list[torch.Tensor]", "FlatLayout"])
def test_a_function_that_answers_is_none_of_them(returned):
    imports = "from zero.comm.group import Group\nfrom zero.plan.layout import FlatLayout\n"
    assert not list(hands_out_parts(f"{imports}def f(optimizer) -> {returned}: ..."))


def test_promises_the_zoo_and_parity_are_tested_from_outside():
    for name, path in TESTS.items():
        if re.fullmatch(OFF_THE_INSIDE, name) and name not in KNOW_THE_INSIDE:
            text = path.read_text(encoding="utf-8")
            known = [*inside_in(text), *reads_parts(text)]
            assert not known, f"{name} knows {known} of the inside: have tests/inside.py read it"
    for name in KNOW_THE_INSIDE:
        assert list(inside_in(TESTS[name].read_text(encoding="utf-8"))), f"{name} knows nothing of the inside any more"


def test_few_tests_know_the_inside():
    known = [name for name, path in TESTS.items() if any(inside_in(path.read_text(encoding="utf-8")))]
    assert len(known) <= MOST_TESTS_INSIDE, known


def dropped_trainings(text):
    """The lines that shard a model and drop its optimizer at once, where that is not expected to fail."""
    calls = [node for node in nodes_of(text) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    sharding = [node for node in calls if ast.unparse(node.value.func) in ("shard", "zero.shard")]
    if not sharding:
        return []
    blocks = [node for node in nodes_of(text) if isinstance(node, ast.With)]
    guards = [block for block in blocks if any("raises" in ast.unparse(item) for item in block.items)]
    guards += [node for node in nodes_of(text) if isinstance(node, ast.Try)]
    guarded = {id(inner) for guard in guards for inner in ast.walk(guard)}
    return [node.lineno for node in sharding if id(node) not in guarded]


def test_no_test_drops_the_optimizer_of_a_model_that_it_shards():
    """The model would be a plain one again at once, and the test one of torch."""
    assert {name: lines for name, path in TESTS.items() if (lines := dropped_trainings(path.read_text()))} == {}


def test_an_optimizer_that_is_dropped_is_found():
    assert dropped_trainings("zero.shard(model, inner)\nshard(model, inner)") == [1, 2]
    kept = "optimizer = shard(model, inner)\nshard(model, inner).close()\nwith failing, pytest.raises(OSError):\n    shard(1)"
    assert dropped_trainings(kept) == []


@pytest.mark.parametrize("text", [
    "import zero.sharding.state", "from zero.memory import masters", "from zero.window.rounds import Reducer",
    "def f():\n    from zero import window", "from zero.config.deepspeed.keys import KNOWN",
])  # fmt: skip
def test_what_is_inside_is_known_as_such(text):
    assert list(inside_in(text))


@pytest.mark.parametrize("text", [
    "import zero", "from zero import Engine, ZeroError, shard", "from zero.errors import GroupLost",
    "import zero.compat.deepspeed", "from zero.config.schema import Offload", "from zero.optim import muon",
    "from zero.integrations import transformers", "from tests import inside", "import zeroconf",
])  # fmt: skip
def test_what_users_import_is_not(text):
    assert not list(inside_in(text))


def text_of(pyproject):
    return pyproject.read_text(encoding="utf-8")


def test_nothing_asks_for_numpy_but_what_a_user_asks_for_it():
    """torch runs without it, and a tensor's method raises then; `host_bytes` does not."""
    of_users = [f"zero/runtime/params/{name}.py" for name in ("absent", "unread", "operators")]
    of_users.append("zero/checkpoint/values.py")  # values that were saved as NumPy's
    for name in SOURCES:
        calls = [node for node in nodes(name) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
        asked = [node.lineno for node in calls if node.func.attr in ("numpy", "from_numpy", "__array__")]
        imports = [node for node in nodes(name) if isinstance(node, (ast.Import, ast.ImportFrom))]
        asked += [node.lineno for node in imports if "numpy" in ast.unparse(node)]
        assert not asked or name in of_users, f"{name}: {asked}"


def packaged_in(project):
    """The packages that a wheel of a folder has, by what its pyproject.toml says."""
    [include] = re.findall(r"^include = (\[.*\])$", text_of(project / "pyproject.toml"), re.MULTILINE)
    return set(find_namespace_packages(str(project), include=ast.literal_eval(include)))


def test_a_wheel_has_every_package_of_its_own_and_the_product_has_nothing_of_the_simulated_device():
    folders = {name.rpartition("/")[0].replace("/", ".") for name in SOURCES}
    for project, ours in ((ROOT, ("accelerators", "zero")), (SIMULATED, ("accelerators_sim",))):
        found = {package for package in packaged_in(project) if not package.endswith("__pycache__")}
        assert found == {folder for folder in folders if folder.partition(".")[0] in ours}


def test_the_simulated_device_asks_for_the_version_beside_which_it_lies():
    [version] = re.findall(r'^version = "(.*)"$', text_of(ROOT / "pyproject.toml"), re.MULTILINE)
    [of_simulated] = re.findall(r'^version = "(.*)"$', text_of(SIMULATED / "pyproject.toml"), re.MULTILINE)
    [asked] = re.findall(r'"zero-accelerators==(.*)"', text_of(SIMULATED / "pyproject.toml"))
    assert version == of_simulated == asked


@pytest.mark.parametrize("project", [ROOT, SIMULATED], ids=["product", "simulated"])
def test_what_is_no_python_is_packaged(project):
    """An installed package has what pyproject.toml lists; a checkout has everything."""
    listing = text_of(project / "pyproject.toml").partition("[tool.setuptools.package-data]")[2].partition("\n[")[0]
    packaged = re.findall(r"^(\w+) = \[(.*)\]$", listing, re.MULTILINE)
    listed = {f"{package}/{path}" for package, paths in packaged for path in re.findall(r'"([^"]+)"', paths)}
    folders = [folder for folder in PACKAGES.values() if folder.parent == project]
    others = {path for folder in folders for path in folder.rglob("*") if path.suffix not in (".py", ".pyc")}
    assert {path.relative_to(project).as_posix() for path in others if path.is_file()} == listed
