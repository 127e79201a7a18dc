"""OmniServe: latency-sensitive requests within their targets, best-effort requests with what is left."""
