"""A program that answers a line on stdin with a line on stdout."""
import subprocess
import sys


class Worker:
    def __init__(self, command):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        if not line or line.startswith("error"):
            sys.exit(f"{' '.join(self.process.args)}: {line.strip() or f'it ended with {self.process.wait()}'}")
        return line

    def end(self):
        self.process.stdin.close()
        self.process.wait()
