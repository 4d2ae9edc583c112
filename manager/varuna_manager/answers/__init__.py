"""What all answers of the REST API share: parts of documents, pages, errors."""
