"""What a server shows of itself: metrics, status page, log."""
