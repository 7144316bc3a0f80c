"""The sqlite3 shell on a database file, fed through a pipe: transactions, journal, integrity check."""
import subprocess

from belay_rounds import check, finish, nap, running, rounds

db = subprocess.Popen(["sqlite3", "-batch", "data.db"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1)


def ask(sql):
    db.stdin.write(sql + "\nselect '--end';\n")
    db.stdin.flush()
    out = []
    while (line := db.stdout.readline().rstrip("\n")) != "--end":
        check(db.poll() is None, "sqlite3 ended: " + "\n".join(out))
        out.append(line)
    return out


# In WAL mode all files stay open, so that a restart can put them back together.
check(ask("pragma journal_mode = wal;") == ["wal"], "WAL mode")
ask("create table t (k integer primary key, v text, w integer);")
while running():
    n = rounds()
    inserts = " ".join(f"insert into t values ({n * 10 + i}, hex(randomblob(200)), {i});" for i in range(8))
    ask(f"begin; {inserts} delete from t where k < {n * 10 - 3000}; commit;")
    got = ask("select count(*) from t;")
    check(got == [str(min(n, 301) * 8)], f"count {got} in round {n}")
    check(ask(f"select sum(w) from t where k >= {n * 10};") == ["28"], "sum")
    if n % 10 == 0:
        check(ask("pragma integrity_check;") == ["ok"], "integrity check")
    nap(2)
check(ask("pragma integrity_check;") == ["ok"], "integrity check at the end")
db.stdin.close()
check(db.wait(20) == 0, "sqlite3's exit status")
finish()
