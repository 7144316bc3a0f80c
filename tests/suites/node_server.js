// An HTTP server with keep-alive clients, worker threads with shared memory, timers and a child process.
const { Worker, isMainThread, parentPort, workerData } = require("worker_threads");
const http = require("http"), fs = require("fs"), crypto = require("crypto"), { spawn } = require("child_process");
if (!isMainThread) {
  const a = new Int32Array(workerData);
  parentPort.on("message", (m) => {
    Atomics.add(a, 0, 1);
    parentPort.postMessage([m, crypto.createHash("sha1").update(String(m)).digest("hex")]);
  });
} else {
  const fail = (w) => { console.log("FAIL node_server: " + w); process.exit(1); };
  process.on("uncaughtException", (e) => fail(e.stack));
  const shared = new SharedArrayBuffer(64), view = new Int32Array(shared), agent = new http.Agent({ keepAlive: true });
  const workers = [0, 1, 2].map(() => new Worker(__filename, { workerData: shared }));
  const waiting = new Map();
  for (const w of workers) w.on("message", ([m, h]) => waiting.get(m)(h));
  let ticks = 0, n = 0, asked = 0;
  const timer = setInterval(() => ticks++, 5);
  const cat = spawn("cat");
  let catBack = "";
  cat.stdout.on("data", (d) => (catBack += d));
  const server = http.createServer((q, r) => r.end("you asked " + q.url));
  server.keepAliveTimeout = 3600e3;
  const get = (port, path) => new Promise((ok) => http.get({ port, path, agent, host: "127.0.0.1" }, (r) => {
    let b = "";
    r.on("data", (d) => (b += d));
    r.on("end", () => ok(b));
  }).on("error", (e) => fail("http " + e.stack)));
  const beat = () => {
    const fd = fs.openSync(process.env.BELAY_TEST_BEAT, fs.constants.O_WRONLY | fs.constants.O_CREAT, 0o666);
    fs.writeSync(fd, String(n).padStart(19, "0") + "\n", 0);
    fs.closeSync(fd);
  };
  server.listen(0, "127.0.0.1", async () => {
    const port = server.address().port;
    while (!fs.existsSync(process.env.BELAY_TEST_GO)) {
      n++;
      beat();
      const r = await Promise.all([1, 2, 3].map((i) => get(port, `/${n}/${i}`)));
      r.forEach((b, i) => b === `you asked /${n}/${i + 1}` || fail("answer " + b));
      const hashes = await Promise.all(workers.map((w, i) => new Promise((ok) => { const m = n * 3 + i; waiting.set(m, ok); w.postMessage(m); asked++; })));
      hashes.forEach((h, i) => h === crypto.createHash("sha1").update(String(n * 3 + i)).digest("hex") || fail("hash"));
      if (Atomics.load(view, 0) !== asked) fail("shared counter " + view[0] + " expected " + asked);
      const t = ticks;
      cat.stdin.write(`line ${n}\n`);
      while (ticks === t || !catBack.endsWith(`line ${n}\n`)) await new Promise((ok) => setTimeout(ok, 2));
      catBack = "";
    }
    clearInterval(timer);
    cat.kill();
    for (const w of workers) await w.terminate();
    server.close();
    agent.destroy();
    console.log("PASS node_server " + n + " rounds");
    process.exit(0);
  });
}
