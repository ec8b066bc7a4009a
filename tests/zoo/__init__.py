"""Every language model class of transformers, tiny, native against patched."""
