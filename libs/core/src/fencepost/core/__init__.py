"""The deciding code: pure, no I/O, no clock, no randomness."""
