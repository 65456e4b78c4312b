//! A watch over all threads. A thread that stays in one call for [`PATIENCE`] ends the program, and
//! the watch prints what each thread was doing.

use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::Thread;
use std::time::Duration;

use offshoot_btrfs::Filesystem;

/// How often the watch looks.
const LOOK: Duration = Duration::from_millis(250);

/// How many looks may find a thread in the same call: two minutes. A call waits for a few commits
/// at most.
const PATIENCE: u64 = 480;

/// A thread's notice of what it is doing.
#[derive(Default)]
pub(crate) struct ThreadNotice {
    calls: AtomicU64,
    /// `None` between calls.
    call: Mutex<Option<&'static str>>,
}

impl ThreadNotice {
    /// Notes that the thread begins this call.
    pub(crate) fn begin(&self, call: &'static str) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        *self.call.lock().expect("no thread panicked") = Some(call);
    }

    pub(crate) fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    fn call(&self) -> Option<&'static str> {
        *self.call.lock().expect("no thread panicked")
    }
}

/// Clears the notice when the thread ends, by a panic too.
struct ClearNotice<'a>(&'a ThreadNotice);

impl Drop for ClearNotice<'_> {
    fn drop(&mut self) {
        *self.0.call.lock().expect("no thread panicked") = None;
    }
}

/// Ends the watch when the work ends, by a panic too.
struct EndWatch<'a>(&'a AtomicBool, Thread);

impl Drop for EndWatch<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        self.1.unpark();
    }
}

/// Runs `work` with its number on one thread for each of `posts`, under watch.
pub(crate) fn watched(fs: &Filesystem, posts: &[ThreadNotice], work: impl Fn(usize) + Sync) {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| watch(fs, posts, &is_over));
        let _over = EndWatch(&is_over, watch.thread().clone());
        std::thread::scope(|scope| {
            for (number, post) in posts.iter().enumerate() {
                let work = &work;
                scope.spawn(move || {
                    let _leave = ClearNotice(post);
                    work(number);
                });
            }
        });
    });
}

fn watch(fs: &Filesystem, posts: &[ThreadNotice], is_over: &AtomicBool) {
    let mut seen: Vec<(u64, u64)> = vec![(0, 0); posts.len()];
    while !is_over.load(Ordering::Relaxed) {
        std::thread::park_timeout(LOOK);
        for (post, (calls, looks)) in posts.iter().zip(&mut seen) {
            let now = post.calls();
            *looks = if now == *calls && post.call().is_some() { *looks + 1 } else { 0 };
            *calls = now;
            if *looks > PATIENCE {
                give_up(fs, posts);
            }
        }
    }
}

/// Ends the program: joining threads that never end would hang too.
fn give_up(fs: &Filesystem, posts: &[ThreadNotice]) -> ! {
    // Standard error directly: a test's captured output appears only when the test ends.
    let mut out = std::io::stderr().lock();
    let _ = writeln!(out, "a thread hangs; each with the number of its call:");
    for (number, post) in posts.iter().enumerate() {
        let _ = writeln!(out, "  {number}: {:?}, {}", post.call(), post.calls());
    }
    let (space, stats) = (fs.volume().space_stats(), fs.volume().stats());
    let _ = writeln!(out, "{space:#?}\n{stats:#?}");
    std::process::exit(1);
}
