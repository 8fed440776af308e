"""Real faults on real processes: `python -m scripts.chaos`. See docs/chaos.md."""
