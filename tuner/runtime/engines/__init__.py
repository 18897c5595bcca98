"""Ways into Transformers, vLLM and SGLang."""
