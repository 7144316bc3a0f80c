"""tmux with a shell: keys go in, the screen shows the result."""
import os
import subprocess
import time

from belay_rounds import check, finish, running, rounds

tmux = ["tmux", "-S", os.path.abspath("tmux.sock"), "-f", "/dev/null"]


def run(*a):
    r = subprocess.run([*tmux, *a], capture_output=True, text=True, timeout=30)
    check(r.returncode == 0, f"tmux {a}: {r.stderr}")
    return r.stdout


run("new-session", "-d", "-s", "s", "-x", "100", "-y", "30", "env -i PS1='$ ' TERM=screen sh")
while running():
    n = rounds()
    run("send-keys", "-t", "s", f"clear; echo answer $(({n} * 3)) end", "Enter")
    end = time.monotonic() + 20
    while f"answer {n * 3} end" not in run("capture-pane", "-p", "-t", "s"):
        check(time.monotonic() < end, "the shell in tmux does not answer: " + run("capture-pane", "-p", "-t", "s"))
        time.sleep(0.01)
        running()
run("kill-server")
finish()
