"""Code that only reproduces a paper. The schemes beside this folder use it for some settings."""
