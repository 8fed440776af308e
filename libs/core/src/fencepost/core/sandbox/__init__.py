"""
The sandbox family: epochs, steps, holders and claims of sandboxes.

Rule 1: every condition that fences, commits or refuses a step is in this package.
Rule 2: it does not know which process asks, or how the answer travels.
"""
