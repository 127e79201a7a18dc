"""What an executor did and when: recorded, drawn, and written as a Perfetto trace."""
