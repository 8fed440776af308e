"""
Any git history as tool steps: what `fencepost import-git` sends, and how its end is checked.

`diffs` reads what git prints and `convert` turns it into steps: both only compute. `repository`
asks git, `trees` names what a folder holds, `running` sends the steps and causes the trouble.
"""
