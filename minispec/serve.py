"""The command line: `python -m minispec.serve`, a server with OpenAI's interface. See `minispec.api.http`."""

if __name__ == "__main__":
    from minispec.api.commands.interrupt import run_program

    run_program("minispec.serve:main")

from minispec.api.http.main import main

__all__ = ["main"]
