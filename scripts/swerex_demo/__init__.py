"""The counterexample on a runtime that nobody here wrote: real SWE-ReX servers."""
