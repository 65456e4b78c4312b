//! Which entries of a directory lead to directories: the way back down, for a walk that must not
//! enter a directory twice.

use std::ops::ControlFlow;
use std::sync::Arc;

use offshoot_kit::sync::Mutex;
use offshoot_vfs::{Errno, Error, Result, Structure};
use offshoot_xfs_format::Ino;
use offshoot_xfs_format::dir::{XfsDirEntry, file_type};
use quick_cache::Weighter;
use quick_cache::sync::Cache;

use super::XfsDirectory;
use crate::inode::file_id;

/// The entries of a directory that lead to directories, or may do so: inode and cookie, ascending.
type ChildTable = Arc<[(Ino, u64)]>;

/// What tells a state of a directory from others: its generation, and how often it has changed.
/// Commits of other inodes, and of its attributes alone, do not make a table worthless.
type DirectoryState = (u32, u64);

/// The table of a directory, with the state that the directory had before it was made; `None` if it
/// would be too large: then the directory is searched each time.
type KeptTable = (DirectoryState, Option<ChildTable>);

/// The locks under which tables are made, each for the directories whose numbers end alike.
const MAKERS: usize = 16;

/// How often a name is looked for again because the directory changes meanwhile.
const MOST_TRIES: usize = 100;

/// The tables that the cache expects. So few are in one shard, which takes a table of any size up
/// to half of the budget.
const TABLES: usize = 32;

/// Weighs a table by its memory.
#[derive(Clone)]
struct ChildTableWeight;

impl Weighter<Ino, KeptTable> for ChildTableWeight {
    fn weight(&self, _: &Ino, (_, table): &KeptTable) -> u64 {
        (64 + table.as_ref().map_or(0, |table| size_of_val(&**table))) as u64
    }
}

/// The tables of the directories that were asked for last.
#[derive(Debug)]
pub(crate) struct DirectoryChildren {
    cache: Cache<Ino, KeptTable, ChildTableWeight>,
    /// The most entries of a table.
    most: usize,
    /// Held by the thread that makes the table of a directory. Others wait for it.
    makers: [Mutex<()>; MAKERS],
}

impl DirectoryChildren {
    /// A cache of at most `budget_bytes`.
    pub(crate) fn new(budget_bytes: u64) -> Self {
        let most = budget_bytes / 2 / size_of::<(Ino, u64)>() as u64;
        Self {
            cache: Cache::with_weighter(TABLES, budget_bytes, ChildTableWeight),
            most: usize::try_from(most).unwrap_or(usize::MAX),
            makers: Default::default(),
        }
    }

    /// The name of the only entry of `above` that leads to the directory `child`.
    ///
    /// # Errors
    /// `EAGAIN` when the entry changes its name all the time.
    pub(crate) fn name_of(&self, above: &XfsDirectory<'_>, child: Ino) -> Result<Vec<u8>> {
        let ino = above.ino;
        for _ in 0..MOST_TRIES {
            let (state, table) = self.table_of(above)?;
            let found: Vec<_> = match table {
                Some(table) => {
                    let start = table.partition_point(|(ino, _)| *ino < child);
                    let of_child = table[start..].iter().take_while(|(ino, _)| *ino == child);
                    of_child.take(2).map(|(_, cookie)| *cookie).collect()
                }
                None => search(above, child)?,
            };
            if let [cookie] = found[..]
                && let Some(name) = above.name_at(cookie)?
                && above.lookup(&name).is_ok_and(|found| found == child)
            {
                return Ok(name);
            }
            if state == state_of(above)? {
                return Err(not_one(above, child, found.is_empty()));
            }
        }
        let what = format!("{} in {}, which is renamed all the time", file_id(child), file_id(ino));
        Err(Error::posix(Errno::AGAIN, what))
    }

    /// The table of a directory as it is now, or was after the last commit before this call.
    fn table_of(&self, directory: &XfsDirectory<'_>) -> Result<KeptTable> {
        let ino = directory.ino;
        let kept = |state| self.cache.get(&ino).filter(|kept| kept.0 == state);
        if let Some(kept) = kept(state_of(directory)?) {
            return Ok(kept);
        }
        let maker = self.makers.get(usize::try_from(ino.0).unwrap_or(0) % MAKERS);
        let _making = maker.map(Mutex::lock);
        // Another thread may have made it meanwhile, of a directory that has changed meanwhile.
        let state = state_of(directory)?;
        if let Some(kept) = kept(state) {
            return Ok(kept);
        }
        let newest = (state, table(directory, self.most)?);
        self.cache.insert(ino, newest.clone());
        Ok(newest)
    }
}

/// The error about a directory that the one above it does not name once.
#[cold]
fn not_one(above: &XfsDirectory<'_>, child: Ino, is_nameless: bool) -> Error {
    let number = if is_nameless { "no name" } else { "several names" };
    let problem = format!("{}, which is above it, has {number} for it", file_id(above.ino));
    Error::corrupt(Structure::Directory, problem).in_file(file_id(child))
}

/// The state of a directory now.
fn state_of(directory: &XfsDirectory<'_>) -> Result<DirectoryState> {
    let inode = directory.inodes.get(directory.buffers, file_id(directory.ino))?;
    Ok((inode.core.generation.get(), inode.core.changecount.get()))
}

/// The table of a directory; `None` when it has more than `most` entries.
fn table(directory: &XfsDirectory<'_>, most: usize) -> Result<Option<ChildTable>> {
    let mut children = Vec::new();
    let mut others = false;
    let add = |children: &mut Vec<_>, cookie: u64, entry: &XfsDirEntry<'_>| {
        children.push((entry.ino, cookie));
        if children.len() > most { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    directory.entries(0, &mut |cookie, entry| {
        if may_be_directory(&entry) {
            return Ok(add(&mut children, cookie, &entry));
        }
        others = true;
        Ok(ControlFlow::Continue(()))
    })?;
    children.sort_unstable();
    let known = children.len();
    // An entry may lie about the type of a directory that another one names too.
    if others && known > 0 && known <= most {
        directory.entries(0, &mut |cookie, entry| {
            let names_child = !may_be_directory(&entry)
                && children[..known].binary_search_by_key(&entry.ino, |(ino, _)| *ino).is_ok();
            if names_child {
                return Ok(add(&mut children, cookie, &entry));
            }
            Ok(ControlFlow::Continue(()))
        })?;
        children.sort_unstable();
    }
    Ok((children.len() <= most).then(|| children.into()))
}

fn may_be_directory(entry: &XfsDirEntry<'_>) -> bool {
    matches!(entry.file_type, file_type::DIR | file_type::UNKNOWN)
}

/// The cookies of the first two entries that lead to `child`.
fn search(directory: &XfsDirectory<'_>, child: Ino) -> Result<Vec<u64>> {
    let mut found = Vec::new();
    directory.entries(0, &mut |cookie, entry| {
        if entry.ino == child {
            found.push(cookie);
        }
        Ok(if found.len() < 2 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
    })?;
    Ok(found)
}
