//! The threads of a mount over `/dev/fuse` stay: few are started, however many requests come.

use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use offshoot_fuse::{MountOptions, MountPoint, ServeOptions, Server, Transport, Unmount, unmount};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::model::Model;
use offshoot_testkit::scratch_dir;
use offshoot_vfs::Timestamp;
use tracing::Level;

/// Counts the events that tell of a new thread.
#[derive(Clone, Default)]
struct StartedThreads(Arc<AtomicUsize>);

impl Write for StartedThreads {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if String::from_utf8_lossy(line).contains("starting a thread of /dev/fuse") {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Once a thread was started and ended for nearly every request: 1,149 threads for 1,000 files.
#[test]
fn few_threads_serve_many_requests() {
    let Some(_judges) = judges::require() else { return };
    let started = StartedThreads::default();
    let writer = started.clone();
    // The threads of the mount have no subscriber but this one.
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(Level::DEBUG)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::set_global_default(subscriber).expect("the only test of this file");
    let dir = scratch_dir();
    let place = MountPoint::new(dir.path(), MountOptions::new("threads", "threads"));
    let options = ServeOptions::over(Transport::Device);
    let model = Box::new(Model::made_at(Timestamp::now()));
    let server = Server::start(model, Arc::new(place), options).expect("a mount");
    let serving = thread::spawn(move || server.wait());
    let makes: Vec<_> = (0..2)
        .map(|client| {
            let dir = dir.path().to_path_buf();
            thread::spawn(move || {
                (0..500).try_for_each(|number| {
                    File::create(dir.join(format!("{client}-{number}")))?.write_all(b"contents")
                })
            })
        })
        .collect();
    let made = makes.into_iter().all(|make| make.join().is_ok_and(|result| result.is_ok()));
    unmount(dir.path(), Unmount::Unused).expect("no program uses the mount");
    serving.join().expect("no panic").expect("a good end");
    assert!(made, "not all files were made");
    let started = started.0.load(Ordering::Relaxed);
    assert!((1..=16).contains(&started), "{started} threads were started for 1,000 files");
}
