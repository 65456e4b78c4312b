//! Reads every file of a volume, with four threads: `read_with_four_threads disk.img`. Each file
//! that is read was verified.

use std::error::Error;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

use offshoot::{FileType, Volume};

fn main() -> Result<(), Box<dyn Error>> {
    let image = std::env::args_os().nth(1).ok_or("usage: read_with_four_threads IMAGE")?;
    let volume = Volume::open(image)?;
    let mut files = Vec::new();
    let mut unread = 0;
    volume.walk("/", |entry| {
        match entry {
            Ok(entry) if entry.attr.file_type == FileType::Regular => files.push(*entry.attr),
            Ok(_) => {}
            Err(error) => {
                eprintln!("{error}");
                unread += 1;
            }
        }
        ControlFlow::Continue(())
    })?;
    let (next, bytes) = (AtomicUsize::new(0), AtomicU64::new(0));
    let read = || {
        let mut failed = 0;
        while let Some(attr) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
            let result = volume.files().read_data(attr.file, 0..attr.size, &mut |_, piece| {
                bytes.fetch_add(piece.len() as u64, Ordering::Relaxed);
                Ok(())
            });
            if let Err(error) = result {
                eprintln!("{error}");
                failed += 1;
            }
        }
        failed
    };
    thread::scope(|scope| {
        let threads = [(); 4].map(|()| scope.spawn(read));
        for thread in threads {
            unread += thread.join().expect("a reader does not panic");
        }
    });
    println!("{} files, {} bytes", files.len(), bytes.into_inner());
    if unread == 0 { Ok(()) } else { Err(format!("{unread} could not be read").into()) }
}
