//! Names that a directory has twice.
//!
//! Two entries with one name have one hash. A directory with a tree of hashes has all entries of
//! one hash in a row there, so only entries with equal hashes are read again and compared. In a
//! sound directory of 100,000 entries these are one or two pairs.
//!
//! Names are compared by another hash, of 64 bits. So a directory in which all names have one hash
//! takes no more memory than the table of [`check`](super) says.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};

use offshoot_xfs_format::dir::DirCookie;

use super::finding::XfsFindingCode as Code;
use super::inode::InodePass;
use crate::buffer::DirectoryView;
use crate::da::HashTree;
use crate::inode::LoadedInode;

/// The most entries with one hash that are compared. The tree of a hostile directory may lead to
/// one leaf from many places.
const MOST_COMPARED: usize = 1 << 20;

/// Names that were seen, as hashes. Their key is random, so no volume can be made to have two names
/// with one hash.
#[derive(Default)]
pub(super) struct SameNames {
    key: RandomState,
    seen: HashSet<u64>,
}

/// Entries in the order of their hashes, of which those with the same hash as the last are kept.
#[derive(Default)]
pub(super) struct SameHash {
    hash: u32,
    cookies: Vec<DirCookie>,
}

impl SameHash {
    /// Adds an entry. Returns the entries with the hash before it when that hash is complete.
    pub(super) fn add(&mut self, hash: u32, cookie: DirCookie) -> Option<Vec<DirCookie>> {
        let is_new = self.hash != hash;
        let complete = is_new.then(|| std::mem::take(&mut self.cookies));
        self.hash = hash;
        if self.cookies.len() < MOST_COMPARED {
            self.cookies.push(cookie);
        }
        complete.filter(|cookies| cookies.len() > 1)
    }

    /// The entries with the last hash.
    pub(super) fn last(&self) -> &[DirCookie] {
        &self.cookies
    }
}

impl InodePass<'_> {
    /// Notes a name of a directory, and a finding if it was noted before.
    pub(super) fn once(&self, directory: &LoadedInode, names: &mut SameNames, name: &[u8]) {
        if !names.seen.insert(names.key.hash_one(name)) {
            let problem = format!("`{}` is there twice", name.escape_ascii());
            self.check.findings.add(Code::DuplicateName, directory.ino, problem);
        }
    }

    /// Compares the names of entries that have one hash. Those that cannot be read have a finding
    /// of their own.
    pub(super) fn names_with_one_hash(&self, tree: &HashTree<'_>, cookies: &[DirCookie]) {
        // Two hashes of one entry are no two names.
        let mut cookies = cookies.to_vec();
        cookies.sort_unstable_by_key(|cookie| cookie.0);
        cookies.dedup();
        if cookies.len() < 2 {
            return;
        }
        let geometry = self.check.geometry();
        let mut names = SameNames::default();
        for cookie in cookies {
            let (at, offset) = cookie.split(geometry);
            let Ok(buffer) = tree.require(at) else { continue };
            if let Ok(DirectoryView::Data(data)) = buffer.directory(geometry)
                && let Ok(entry) = data.entry(offset)
            {
                self.once(tree.inode, &mut names, entry.name);
            }
        }
    }
}
