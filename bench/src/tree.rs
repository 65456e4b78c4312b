//! Many threads insert into one tree, inside one transaction.
//!
//! | order | keys |
//! |---|---|
//! | series | threads take the next keys of one ascending series: all insert at the right edge |
//! | ranges | each thread fills a range of its own in ascending order |
//! | random | each thread inserts keys of its own, all over the tree, in random order |
//!
//! Each order runs with 1, 2 and 12 threads, and with each way to latch the nodes above a leaf
//! ([`Latching`]). The latches are shared, as in the engine, or exclusive. A thread unlatches them
//! before it searches the leaf, as the engine does, after the search, or after the change. Every
//! run is a process of its own, so that its peak of memory is its own. The device is memory, and
//! nothing commits during the measured time, so the figure is that of the tree.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use offshoot_btrfs::bench::Inserts;
use offshoot_btrfs::{
    BtrfsVolume, EngineOptions, Latching, Mechanisms, MkfsOptions, UnlockTime, mkfs,
};
use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::random::Random;
use offshoot_vfs::Timestamp;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{BenchOptions, Result, table};

const THREADS: [u64; 3] = [1, 2, 12];
const ORDERS: [&str; 3] = ["series", "ranges", "random"];
const SIDES: [(&str, Latching); 6] = [
    ("shared, before search", shared(UnlockTime::BeforeSearch)),
    ("shared, after search", shared(UnlockTime::AfterSearch)),
    ("shared, after change", shared(UnlockTime::AfterChange)),
    ("exclusive, before search", exclusive(UnlockTime::BeforeSearch)),
    ("exclusive, after search", exclusive(UnlockTime::AfterSearch)),
    ("exclusive, after change", exclusive(UnlockTime::AfterChange)),
];

const fn shared(unlock: UnlockTime) -> Latching {
    Latching { is_exclusive: false, unlock }
}

const fn exclusive(unlock: UnlockTime) -> Latching {
    Latching { is_exclusive: true, unlock }
}

/// The size of an item: about that of a directory entry.
const ITEM_BYTES: usize = 40;

/// The number of items that a thread inserts under one handle.
const HANDLE_ITEMS: u64 = 32;

/// Runs the benchmark, or one run of it; `None` for options that it does not know.
pub(crate) fn benchmark(args: &[String]) -> Option<Result> {
    if let [run, order, threads, side, items] = args
        && run == "run"
    {
        let (_, latching) = SIDES.into_iter().find(|(name, _)| name == side)?;
        return Some(one(order, threads.parse().ok()?, latching, items.parse().ok()?));
    }
    let options = BenchOptions::parse(args, &["--rounds", "--items"], &[])?;
    let rounds = options.number("--rounds", 3).filter(|&rounds| rounds > 0)?;
    let items = options.number("--items", 1_000_000).filter(|&items| items > 0)?;
    Some(all(rounds, items, options.dir().as_deref()))
}

/// Runs all sides in turns. Prints a table, and writes JSON if there is a `dir`.
fn all(rounds: usize, items: u64, dir: Option<&Path>) -> Result {
    println!(
        "{:<8} {:>7} {:<24} {:>11} {:>15} {:>6} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8} {:>9}",
        "order",
        "threads",
        "latches above, let go",
        "inserts/s",
        "min..max /1000",
        "x",
        "locks",
        "waits",
        "shared",
        "waits",
        "early",
        "splits",
        "pushes",
        "peak MiB"
    );
    let mut runs = Vec::new();
    for order in ORDERS {
        for threads in THREADS {
            let mut sides = SIDES.map(|(name, _)| (name, Vec::new()));
            for _ in 0..rounds {
                for (name, results) in &mut sides {
                    results.push(child(order, threads, name, items)?);
                }
            }
            let ours = median(&sides[0].1, "inserts_per_s");
            for (name, results) in sides {
                print_row(order, threads, name, &results, ours);
                runs.extend(results);
            }
        }
    }
    let Some(dir) = dir else { return Ok(()) };
    table::write_values(&dir.join("tree.json"), runs)
}

fn print_row(order: &str, threads: u64, name: &str, runs: &[Value], ours: f64) {
    let speeds = || runs.iter().filter_map(|run| run["inserts_per_s"].as_f64());
    let (min, max) = (speeds().fold(f64::MAX, f64::min), speeds().fold(0.0, f64::max));
    let m = |what| median(runs, what);
    println!(
        "{order:<8} {threads:>7} {name:<24} {:>11.0} {:>15} {:>6.2} {:>9.0} {:>9.0} {:>9.0} {:>9.0} {:>9.0} {:>8.0} {:>8.0} {:>9.1}",
        m("inserts_per_s"),
        format!("{:.0}..{:.0}", min / 1000.0, max / 1000.0),
        m("inserts_per_s") / ours,
        m("locks_taken"),
        m("lock_waits"),
        m("shared_locks_taken"),
        m("shared_lock_waits"),
        m("early_unlocks"),
        m("splits"),
        m("pushes"),
        m("peak_kib") / 1024.0,
    );
}

fn median(runs: &[Value], what: &str) -> f64 {
    table::median(runs.iter().filter_map(|run| run[what].as_f64()))
}

/// Makes one run in a process of its own.
fn child(order: &str, threads: u64, side: &str, items: u64) -> Result<Value> {
    let own = std::env::current_exe().map_err(|error| format!("this program: {error}"))?;
    let mut command = Command::new(own);
    command.args(["tree", "run", order, &threads.to_string(), side, &items.to_string()]);
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{command:?} ended with {}\n{said}", output.status));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| format!("{command:?}: {error}"))
}

/// Makes one run in this process, and prints its figures as JSON.
fn one(order: &str, threads: u64, latching: Latching, items: u64) -> Result {
    let volume = volume(latching).map_err(|error| error.to_string())?;
    let series = AtomicU64::new(0);
    let before = volume.stats();
    let started = Instant::now();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                let (volume, series) = (&volume, &series);
                scope.spawn(move || match order {
                    "series" => insert(volume, from_series(series, items)),
                    "ranges" => insert(volume, range(items, threads, thread)),
                    _ => insert(volume, random(items, threads, thread)),
                })
            })
            .collect();
        let ends = workers.into_iter().map(|worker| worker.join().expect("no worker panics"));
        ends.collect::<offshoot_vfs::Result<()>>()
    })
    .map_err(|error| error.to_string())?;
    let seconds = started.elapsed().as_secs_f64();
    let stats = volume.stats();
    let inserted = stats.items_inserted_singly - before.items_inserted_singly;
    if inserted != items {
        return Err(format!("{inserted} of {items} items were inserted"));
    }
    #[expect(clippy::cast_precision_loss, reason = "a speed is not exact")]
    let speed = inserted as f64 / seconds;
    let result = json!({
        "order": order,
        "threads": threads,
        "latching": format!("{latching:?}"),
        "inserts_per_s": speed,
        "locks_taken": stats.locks_taken,
        "lock_waits": stats.lock_waits,
        "shared_locks_taken": stats.shared_locks_taken,
        "shared_lock_waits": stats.shared_lock_waits,
        "early_unlocks": stats.early_unlocks,
        "splits": stats.splits,
        "pushes": stats.pushes,
        "peak_kib": peak_kib()?,
    });
    println!("{result}");
    Ok(())
}

fn volume(latching: Latching) -> offshoot_vfs::Result<Arc<BtrfsVolume>> {
    let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::sparse(64 << 30));
    let options = MkfsOptions::new(Uuid::from_u128(7), Timestamp::default());
    mkfs(std::slice::from_ref(&device), &options)?;
    let options = EngineOptions {
        mechanisms: Mechanisms::default().latching(latching),
        dirty_bytes: u64::MAX,
        commit_interval: None,
        ..EngineOptions::default()
    };
    BtrfsVolume::open_writable(vec![device], &options)
}

fn insert(volume: &BtrfsVolume, numbers: impl Iterator<Item = u64>) -> offshoot_vfs::Result<()> {
    let mut numbers = numbers.peekable();
    while numbers.peek().is_some() {
        let inserts = Inserts::join(volume)?;
        for number in numbers.by_ref().take(small(HANDLE_ITEMS)) {
            inserts.insert(number, &[0; ITEM_BYTES])?;
        }
    }
    Ok(())
}

/// The next numbers of a series that all threads share.
fn from_series(series: &AtomicU64, items: u64) -> impl Iterator<Item = u64> {
    std::iter::from_fn(move || {
        let next = series.fetch_add(1, Ordering::Relaxed);
        (next < items).then_some(next)
    })
}

/// The numbers of a thread among `items`, in ascending order.
fn range(items: u64, threads: u64, thread: u64) -> std::ops::Range<u64> {
    thread * items / threads..(thread + 1) * items / threads
}

/// As many numbers as [`range`] has, in random order. No two threads have a number in common: with
/// 12 threads, thread 3 has numbers that are 3 modulo 12.
fn random(items: u64, threads: u64, thread: u64) -> impl Iterator<Item = u64> {
    let mut random = Random::new(thread);
    let mut numbers: Vec<_> = range(items, threads, thread)
        .map(|_| random.number() / threads * threads + thread)
        .collect();
    numbers.sort_unstable();
    numbers.dedup();
    for last in (1..numbers.len()).rev() {
        numbers.swap(last, small(random.below(last as u64 + 1)));
    }
    numbers.into_iter()
}

fn small(number: u64) -> usize {
    usize::try_from(number).expect("far below the size of memory")
}

/// The largest resident set of this process, in KiB.
fn peak_kib() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").map_err(|e| e.to_string())?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let number = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse().ok());
    number.ok_or_else(|| "the kernel does not say how much memory was used".to_owned())
}
