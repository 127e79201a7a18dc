"""The harness that checks the papers' claims: traces, replay, metrics, figures."""

import apex.environment  # noqa: F401  before matplotlib
