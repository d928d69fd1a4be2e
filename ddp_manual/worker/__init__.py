"""The worker: the process of a rank that runs the program, with torch unless it is an executable."""
