"""Models in other programs' file formats: Hugging Face folders, safetensors, GGUF, and adapters for peft."""
