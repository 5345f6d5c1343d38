"""Models in the files of others: Hugging Face folders, safetensors, GGUF, and adapters for peft."""
