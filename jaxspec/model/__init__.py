"""The model: DeepSeek-V4 as pure functions over immutable trees of arrays."""
