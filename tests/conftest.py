"""Settings of the whole test run: CPU unless told otherwise, hypothesis without a clock."""

import os

import hypothesis

os.environ.setdefault("JAX_PLATFORMS", "cpu")
hypothesis.settings.register_profile("jaxspec", deadline=None, print_blob=True)
hypothesis.settings.load_profile("jaxspec")
