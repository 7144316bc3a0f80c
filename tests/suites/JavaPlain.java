// Threads, locks, garbage collection, sockets, timers; compiled in memory by `java FILE`.
import java.io.*;
import java.net.*;
import java.nio.file.*;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.*;

public class JavaPlain {
    static long n = 0;
    static void fail(String w) { System.out.println("FAIL JavaPlain: " + w); System.out.flush(); Runtime.getRuntime().halt(1); }
    static void beat() throws IOException {
        try (RandomAccessFile f = new RandomAccessFile(System.getenv("BELAY_TEST_BEAT"), "rw")) { f.write(String.format("%019d\n", n).getBytes()); }
    }
    public static void main(String[] a) throws Exception {
        ServerSocket server = new ServerSocket(0, 8, InetAddress.getLoopbackAddress());
        Thread t = new Thread(() -> {
            try {
                Socket s = server.accept();
                BufferedReader r = new BufferedReader(new InputStreamReader(s.getInputStream()));
                for (String l; (l = r.readLine()) != null;) { s.getOutputStream().write((l.length() + " " + l + "\n").getBytes()); }
            } catch (IOException e) { fail("server " + e); }
        });
        t.setDaemon(true);
        t.start();
        Socket c = new Socket(InetAddress.getLoopbackAddress(), server.getLocalPort());
        BufferedReader in = new BufferedReader(new InputStreamReader(c.getInputStream()));
        ExecutorService pool = Executors.newFixedThreadPool(4);
        ScheduledExecutorService timer = Executors.newScheduledThreadPool(1);
        AtomicLong ticks = new AtomicLong();
        timer.scheduleAtFixedRate(ticks::incrementAndGet, 5, 5, TimeUnit.MILLISECONDS);
        ConcurrentHashMap<Long, byte[]> heap = new ConcurrentHashMap<>();
        Path go = Paths.get(System.getenv("BELAY_TEST_GO"));
        while (!Files.exists(go)) {
            n++;
            beat();
            List<Future<Long>> f = new ArrayList<>();
            for (int i = 0; i < 8; i++) {
                final long k = n * 8 + i;
                f.add(pool.submit(() -> { byte[] b = new byte[20000]; Arrays.fill(b, (byte) k); heap.put(k, b); heap.remove(k - 400); return k * k; }));
            }
            for (int i = 0; i < 8; i++) if (f.get(i).get(30, TimeUnit.SECONDS) != (n * 8 + i) * (n * 8 + i)) fail("future");
            for (Map.Entry<Long, byte[]> e : heap.entrySet()) if (e.getValue()[777] != (byte) (long) e.getKey()) fail("heap");
            String m = "message " + n;
            c.getOutputStream().write((m + "\n").getBytes());
            if (!(m.length() + " " + m).equals(in.readLine())) fail("socket");
            long before = ticks.get(), end = System.nanoTime() + 20_000_000_000L;
            while (ticks.get() == before) { if (System.nanoTime() > end) fail("timer stopped"); Thread.sleep(1); }
            if (n % 50 == 0) System.gc();
        }
        System.out.println("PASS JavaPlain " + n + " rounds");
        System.out.flush();
        Runtime.getRuntime().halt(0);
    }
}
