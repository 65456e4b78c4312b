//! What every thread is doing, and a watch over them: a thread that does not come to the end of a
//! call for [`PATIENCE`] ends the program, with what all of them were at.

use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::Thread;
use std::time::Duration;

use offshoot_btrfs::Filesystem;

/// How often the watch looks.
const LOOK: Duration = Duration::from_millis(250);

/// How many looks may find a thread in the same call: two minutes, where a call takes a few commits
/// at most.
const PATIENCE: u64 = 480;

/// Where a thread says what it is doing.
#[derive(Default)]
pub(crate) struct Post {
    calls: AtomicU64,
    /// `None` while it has nothing to do.
    call: Mutex<Option<&'static str>>,
}

impl Post {
    /// The thread begins with this call.
    pub(crate) fn begin(&self, call: &'static str) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        *self.call.lock().expect("nobody panics here") = Some(call);
    }

    /// How many calls there were.
    pub(crate) fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    fn call(&self) -> Option<&'static str> {
        *self.call.lock().expect("nobody panics here")
    }
}

/// The thread of a post is gone, also where it panicked.
struct Leave<'a>(&'a Post);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        *self.0.call.lock().expect("nobody panics here") = None;
    }
}

/// The work is over, also where it panicked.
struct Over<'a>(&'a AtomicBool, Thread);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        self.1.unpark();
    }
}

/// Does `work` on a thread for each of `posts`, with its number, under watch.
pub(crate) fn watched(fs: &Filesystem, posts: &[Post], work: impl Fn(usize) + Sync) {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| watch(fs, posts, &is_over));
        let _over = Over(&is_over, watch.thread().clone());
        std::thread::scope(|scope| {
            for (number, post) in posts.iter().enumerate() {
                let work = &work;
                scope.spawn(move || {
                    let _leave = Leave(post);
                    work(number);
                });
            }
        });
    });
}

fn watch(fs: &Filesystem, posts: &[Post], is_over: &AtomicBool) {
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

/// Nobody waits for threads that never end: the program does not either.
fn give_up(fs: &Filesystem, posts: &[Post]) -> ! {
    // Not what tests print, which is kept until they end.
    let mut out = std::io::stderr().lock();
    let _ = writeln!(out, "a thread hangs; each with the number of its call:");
    for (number, post) in posts.iter().enumerate() {
        let _ = writeln!(out, "  {number}: {:?}, {}", post.call(), post.calls());
    }
    let (space, stats) = (fs.volume().space_stats(), fs.volume().stats());
    let _ = writeln!(out, "{space:#?}\n{stats:#?}");
    std::process::exit(1);
}
