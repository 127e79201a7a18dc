"""The engine on a thread of its own, served to asyncio."""
