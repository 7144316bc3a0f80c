"""subprocess: pipes, exit codes, a long-lived filter, timeouts."""
import subprocess

from belay_rounds import check, finish, nap, running, rounds

bc = subprocess.Popen(["perl", "-ne", "$|=1; print $_ * 7, \"\\n\""], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
while running():
    n = rounds()
    r = subprocess.run(["sh", "-c", f"read x; echo got $x; exit {n % 100}"], input=f"{n}\n", capture_output=True, text=True, timeout=30)
    check(r.stdout == f"got {n}\n" and r.returncode == n % 100, f"shell said {r.stdout!r} {r.returncode}")
    bc.stdin.write(f"{n}\n")
    bc.stdin.flush()
    check(bc.stdout.readline() == f"{n * 7}\n", "the filter's answer")
    p = subprocess.Popen(["sleep", "1000"])
    check(p.poll() is None, "sleep ended")
    p.terminate()
    check(p.wait(20) == -15, "terminated child's status")
    nap(1)
bc.stdin.close()
check(bc.wait(20) == 0, "the filter's exit status")
finish()
