use super::*;

#[cfg(feature = "shuttle")]
mod model {
    use std::sync::Arc;

    use shuttle::thread;

    use super::*;
    use crate::sync::atomic::AtomicU64;

    /// Changes that a writer makes in one schedule.
    const CHANGES: u64 = 2;

    /// Two writers change both copies, and two readers compare what they find with what writers
    /// have done.
    fn schedule() {
        let lock = Arc::new(SpreadRwLock::new("number", || 0));
        let (done, is_inside) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let writers = [(); 2].map(|()| {
            let (lock, done, is_inside) = (lock.clone(), done.clone(), is_inside.clone());
            thread::spawn(move || {
                for _ in 0..CHANGES {
                    let mut held = lock.write();
                    assert!(
                        lock.is_closing.load(Ordering::Acquire),
                        "readers would come in between"
                    );
                    assert!(!is_inside.swap(true, Ordering::AcqRel), "two writers");
                    held.change(|number| *number += 1);
                    assert!(held.copies.iter().all(|number| **number == *held));
                    is_inside.store(false, Ordering::Release);
                    done.store(*held, Ordering::Release);
                }
            })
        });
        // Neighbours among the threads may have the same copy.
        let readers = [(); 2].map(|()| {
            let (lock, done, is_inside) = (lock.clone(), done.clone(), is_inside.clone());
            thread::spawn(move || {
                for turn in 0..2 * CHANGES {
                    let before = done.load(Ordering::Acquire);
                    let held = if turn % 2 == 0 { Some(lock.read()) } else { lock.try_read() };
                    let Some(held) = held else { continue };
                    assert!(*held >= before, "a change that was made before is not there");
                    assert!(!is_inside.load(Ordering::Acquire), "a reader and a writer");
                    assert_eq!(*held, done.load(Ordering::Acquire), "a change is half made");
                }
            })
        });
        for thread in writers.into_iter().chain(readers) {
            thread.join().expect("it ends");
        }
        assert_eq!(*lock.read(), 2 * CHANGES);
    }

    #[test]
    fn readers_see_whole_changes_in_every_order() {
        shuttle::check_random(schedule, 4000);
        shuttle::check_pct(schedule, 4000, 3);
    }
}

#[cfg(not(feature = "shuttle"))]
mod plain {
    use std::sync::atomic::AtomicUsize;
    use std::thread;

    use super::*;

    #[test]
    fn a_change_is_seen_in_every_copy_and_excludes_readers() {
        for lock in [SpreadRwLock::new("number", || 1), SpreadRwLock::with_few_copies("few", || 1)]
        {
            let on_copies = |look: &(dyn Fn() -> Option<i32> + Sync)| {
                thread::scope(|scope| {
                    let threads: Vec<_> = (0..2 * COPIES).map(|_| scope.spawn(look)).collect();
                    threads.into_iter().map(|one| one.join().expect("it reads")).collect::<Vec<_>>()
                })
            };
            let mut held = lock.write();
            held.change(|number| *number += 1);
            assert_eq!(*held, 2);
            let try_read = || lock.try_read().map(|number| *number);
            assert!(on_copies(&try_read).iter().all(Option::is_none));
            drop(held);
            assert!(on_copies(&|| Some(*lock.read())).iter().all(|number| *number == Some(2)));
        }
    }

    /// Ten thousand subvolumes have such a lock each.
    #[test]
    fn a_lock_with_few_copies_is_small() {
        let lock = SpreadRwLock::with_few_copies("few", || ());
        assert_eq!(lock.copies.len(), cores::count().clamp(1, 8));
        assert!(size_of_val(&*lock.copies) <= 1024);
    }

    /// A reader may have looked for a writer just before the writer came. After that it waits.
    #[test]
    fn readers_that_come_again_and_again_do_not_keep_a_writer_out() {
        const READERS: usize = 8;
        let lock = SpreadRwLock::new("number", || 0);
        let (reads, is_done) = (AtomicUsize::new(0), AtomicBool::new(false));
        thread::scope(|scope| {
            for _ in 0..READERS {
                scope.spawn(|| {
                    while !is_done.load(Ordering::Acquire) {
                        let held = lock.read();
                        reads.fetch_add(1, Ordering::AcqRel);
                        drop(held);
                    }
                });
            }
            // The writer must wait for this reader.
            let held = lock.read();
            scope.spawn(|| {
                lock.write().change(|number| *number += 1);
                is_done.store(true, Ordering::Release);
            });
            while !lock.is_closing.load(Ordering::Acquire) {
                thread::yield_now();
            }
            assert!(lock.try_read().is_none(), "a writer waits");
            let before = reads.load(Ordering::Acquire);
            for _ in 0..10_000 {
                thread::yield_now();
            }
            let since = reads.load(Ordering::Acquire) - before;
            drop(held);
            assert!(since <= 2 * READERS, "{since} reads while a writer waited");
        });
        assert_eq!(*lock.read(), 1);
    }
}
