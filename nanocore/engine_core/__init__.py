"""The engine process: the scheduler, the step loop, the io thread, configuration and the CLI.

Import the module you need: the scheduler and what it rests on import without torch.
"""
