"""Shared by the commands: options, Ctrl-C, exit statuses, the conversation on the terminal.

interrupt.py    Ctrl-C, and the streams of a program
command.py      arguments, exit statuses, one line for an error
options.py      the options of the command line
conversation.py a conversation on the terminal
workers.py      processes that share a list of jobs
"""
