"""What only reproduces a paper, behind the names and settings of the schemes beside this room."""
