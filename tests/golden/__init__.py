"""What the schedulers decided when these files were recorded, to the bit: a rebuild must not change it.

``python -m tests.golden`` records anew. A commit that does so says which digests changed, and why.
"""
