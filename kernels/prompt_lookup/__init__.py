"""Drafts by prompt lookup: what followed the last tokens of a row where they stood before, guessed to follow again.

Definition. Of a row's n tokens t, a place p < n - 1 matches m tokens if t[p - i] == t[n - 1 - i] for all i < m. The
place that matches most, counting no more than MAX_MATCH, is taken, the last of equal ones; it must match MIN_MATCH.
Draft i is the token at p + 1 + i; beyond the end, where the text repeats itself with the period n - 1 - p, the draft a
period before.
"""

MIN_MATCH = 3  # tokens; fewer say little
MAX_MATCH = 16
