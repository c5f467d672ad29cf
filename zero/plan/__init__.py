"""Numbers without torch: where every element lies, and what that costs."""
