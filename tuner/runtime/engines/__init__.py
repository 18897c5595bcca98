"""Ways into Transformers and vLLM."""
