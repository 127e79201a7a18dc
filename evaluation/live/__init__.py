"""Systems that live from one measured point to the next: engines in processes of their own, and vLLM servers."""
