"""Numbers: where every element lies, and what that costs. No torch."""
