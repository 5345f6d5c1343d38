"""From text to tokens: sources, tokenizers, token stores, held-out splits."""
