"""What a compression cost: perplexity and sizes."""
