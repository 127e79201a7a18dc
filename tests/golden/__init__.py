"""What was decided, computed and printed when these files were recorded, to the bit: a rebuild must not change it.

- ``test_plans.py``: every plan of ten systems under seeded workloads (aborts, tiny pools, dear hand-overs, hosts that
  die). Digests are in ``plans.json``.
- ``test_settings.py``: throughput and latency of ten systems on six predicted machines (``settings.json``).
- ``test_tokens.py``: greedy tokens of a tiny model in float32 under ten systems, some requests on the CPU
  (``tokens.json``).
- ``test_help.py``: the help of every command, with names and defaults of options (``help/``).
- ``test_records.py``: a row of each record in ``docs/records`` that is up to date.
- ``test_by_hand.py``: what follows from a definition: blocks held, all-reduces, a formula's slope, silent and dying
  hosts, throughput under a wrong table.

``record.py`` is the one place that reads engines and plans by their fields: a renamed field is renamed there.
Digests are the same in Python 3.11 and 3.12, and for any seed of hashes.

``python -m tests.golden`` records anew. A commit that does so says which values changed, and why.
"""
