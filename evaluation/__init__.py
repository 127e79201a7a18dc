"""The harness that proves the claims: traces, replay, metrics, figures."""
