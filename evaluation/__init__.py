"""The harness that checks the papers' claims: traces, replay, metrics, figures."""
