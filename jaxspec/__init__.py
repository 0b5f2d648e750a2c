"""DeepSeek-V4 decoding with tree-structured speculation."""

__version__ = "0.1.0"
