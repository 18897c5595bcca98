"""A model's ``config.json``."""

LLAMA = {
    **{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32},
    **{"vocab_size": 128256, "max_position_embeddings": 8192, "torch_dtype": "bfloat16"},
}
