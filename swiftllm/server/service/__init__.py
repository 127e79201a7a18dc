"""The engine on its own thread, with an asyncio interface."""
