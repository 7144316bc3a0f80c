"""Objects, threads, generators, files, regular expressions, big integers, subprocess-free."""
import gc
import hashlib
import queue
import random
import re
import sqlite3
import tempfile
import threading

from belay_rounds import check, finish, nap, running, rounds

rng = random.Random(7)
jobs, done = queue.Queue(), queue.Queue()


def worker():
    while (item := jobs.get()) is not None:
        done.put((item, hashlib.sha256(str(item).encode()).hexdigest()))


threads = [threading.Thread(target=worker) for _ in range(4)]
for t in threads:
    t.start()
log = tempfile.NamedTemporaryFile("w+", dir=".", prefix="log", delete=False)
db = sqlite3.connect(":memory:")
db.execute("create table t (k integer primary key, v text)")
table, model, fib = {}, 0, (1, 1)
while running():
    n = rounds()
    key = rng.randrange(1000)
    table[key] = [key] * rng.randrange(50)
    model = (model * 31 + key) % (1 << 61)
    fib = (fib[1], (fib[0] + fib[1]) % (1 << 4096))
    for i in range(5):
        jobs.put(n * 5 + i)
    got = dict(done.get(timeout=20) for _ in range(5))
    for item, digest in got.items():
        check(hashlib.sha256(str(item).encode()).hexdigest() == digest, "a worker's answer is wrong")
    log.write(f"{n} {model}\n")
    log.flush()
    db.execute("insert or replace into t values (?, ?)", (key, str(model)))
    check(db.execute("select v from t where k=?", (key,)).fetchone()[0] == str(model), "sqlite in memory")
    check(all(v == [k] * len(v) for k, v in table.items()), "the table is damaged")
    check(re.fullmatch(r"(\d+) (\d+)", f"{n} {model}").group(1) == str(n), "re")
    if n % 20 == 0:
        gc.collect()
    nap(2)
log.seek(0)
lines = log.read().splitlines()
check([int(x.split()[0]) for x in lines] == list(range(1, rounds())), "the log's lines are not one per round")
for _ in threads:
    jobs.put(None)
for t in threads:
    t.join()
finish()
