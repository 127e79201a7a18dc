"""The figures of the APEX and NEO papers: simulated, and measured on this machine."""
