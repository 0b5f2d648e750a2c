"""What a program will need on hardware that is not here: ahead-of-time compiles and their limits.

`targets` names the hardware, `compile` runs compilers in processes of their own, `dumps` reads what
they leave behind, `kernels` lists the kernels at the sizes of DeepSeek-V4-Flash, `table` prints.
"""
