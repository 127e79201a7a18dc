"""The system under measurement: in this process, in a child, or behind HTTP. Starts it, replays requests, stops it."""
